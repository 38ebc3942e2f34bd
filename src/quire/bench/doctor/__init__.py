"""What `quire doctor` looks for: on a machine, and in what a running server did during some seconds."""
