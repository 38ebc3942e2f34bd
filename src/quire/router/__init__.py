"""One address for many servers: which of them answers a request, and how its answer gets to the client."""
