"""An hour of traffic with faults, in minutes: a router between simulated engines, and what comes of it."""
