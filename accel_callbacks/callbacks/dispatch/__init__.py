"""Registration, order and firing of callbacks."""
