"""Benchmarks: each prints figure, target and verdict per row, and exits non-zero where a target is missed."""
