"""`kvloop bench`: conversations sent to endpoints, each request recorded, and what the records say."""
