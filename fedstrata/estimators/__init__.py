"""How a direction is obtained: gradients, two-point estimates on the sphere."""
