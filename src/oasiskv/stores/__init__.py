"""Tiers that hold every closed block."""
