"""What both ends call each other by."""

QUEUE = TASK = "least_way"
ANSWERS = "least_way:answers"
# Set when the engine serves.
READY = "least_way:ready"
