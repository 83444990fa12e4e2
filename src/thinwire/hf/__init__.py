"""Models of Hugging Face: folders in and out (floor of train, inference and lab)."""
