"""Programs by different hands: their steps compared by values, their gradients, their updates."""
