"""The control channel: how prefill, decode and router ask each other about leases."""
