"""The engine: a stage at work, and what it leaves."""
