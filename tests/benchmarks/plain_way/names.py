"""What both ends call each other by."""

QUEUE = TASK = "plain_way"
ANSWERS = "plain_way:answers"
# Set when the engine serves.
READY = "plain_way:ready"
