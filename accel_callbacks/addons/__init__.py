"""What a run may have besides: each add-on is a folder that no other room needs."""
