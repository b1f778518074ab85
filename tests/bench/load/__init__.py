"""What `kvloop bench` sends, records and reports."""
