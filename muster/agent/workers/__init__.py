"""Ways to start a worker: cold (`command`), warm (`template`), and what they share."""
