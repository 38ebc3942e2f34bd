"""Several models in one server: which are loaded, who gets a request, and how a version replaces another."""
