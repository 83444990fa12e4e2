"""Peers on other machines: who may join a run, and how they are reached."""
