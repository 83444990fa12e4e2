"""A run: the coordinator and its peers, what they say to each other, and the run's folder."""
