"""Simulations of the lesson that run the simulator: the scheduler that serves, before hardware of known limits."""
