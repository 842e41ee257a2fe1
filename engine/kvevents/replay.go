package kvevents

// end is the sequence number that ends a replay.
const end = 1<<64 - 1
