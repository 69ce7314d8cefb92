"""Plan: wanted blocks, and the swap plan that brings the missing ones into slots."""
