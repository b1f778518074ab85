"""What a benchmark asks: conversations, made up or read from recordings."""
