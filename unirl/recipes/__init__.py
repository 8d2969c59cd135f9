"""Shipped recipes: `<domain>/<name>.yaml`, made of the groups `base model rollout algorithm reward`."""
