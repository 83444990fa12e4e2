"""Pages over HTTP: the server that all of them share, and the page of a run."""
