// Package place is the protocol by which a host finds, reads and writes blocks that a plugin keeps in shared memory,
// without a message on the way of a hit. Its rules are in docs/spec/placement.md.
//
// A block is kept as one or more parts: the shards of its ranks and groups. Each part lies in a slot. A slot's header,
// which both ends write, says what the slot is used for; the host's words, which it alone writes, say who reads it. The
// [Plugin] decides what is kept: it lends slots to the host for saves, promotes blocks from below, and gives blocks up.
// The [Host] believes nothing of what it reads there: its index is private, and each hit is checked against the header.
//
// The package has no clock, goroutine or I/O, and holds no lock while it accesses shared memory, so that a simulator can
// stop either end before each access. The product has a [Host] that reads, and writes slots that were
// lent to it ahead (see [Loan]), and a [Shelf]: a plugin that writes all others itself.
package place
