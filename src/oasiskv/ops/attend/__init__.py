"""Attend: exact attention of one request over its compact block table."""
