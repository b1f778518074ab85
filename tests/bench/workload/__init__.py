"""Tests of what a benchmark asks."""
