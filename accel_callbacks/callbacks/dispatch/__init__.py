"""Registration, order and firing of callbacks.

``Dispatcher`` is what a loop calls: ``registration`` says what is a callback, ``instances`` which
saved state belongs to which of several, ``functions`` makes callbacks of functions, and ``ledger``
counts their calls and time.
"""
