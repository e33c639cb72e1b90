"""What every part of Stretto builds on; imports nothing of the rest."""
