"""Interactive simulations of a lesson about inference, with numbers from the engine's own parts and calculators."""
