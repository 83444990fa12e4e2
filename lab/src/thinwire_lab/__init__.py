"""The lab: measurements and experiments whose numbers the documents quote."""
