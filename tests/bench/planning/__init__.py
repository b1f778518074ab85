"""Plans made from recorded traffic."""
