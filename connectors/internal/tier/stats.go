package tier

import "sync/atomic"

// Stats counts what one tier did since it was opened.
type Stats struct {
	Hits, Misses            uint64 // blocks that Get wanted
	BytesIn, BytesOut       uint64 // written to and read from the tier
	Stored, Known           uint64 // blocks written, and offered although they were there
	Evicted, Expired        uint64
	Torn, Corrupt, Errors   uint64 // slots found half written; damaged blocks; failed reads and writes
	WriteBacks, Prefetches  uint64 // into this tier from above; out of it before somebody asked
	Dropped                 uint64 // write-backs given up: the queue was full, or the block gone
	BelowThreshold, NoQuota uint64 // not stored
	NotAdmitted, AllPinned  uint64 // not stored
	Adopted                 uint64 // blocks taken over from an earlier process
	Blocks, Slots           uint64 // now
}

// counters is Stats while it is counted.
type counters struct {
	hits, misses, bytesIn, bytesOut, stored, known, evicted, expired, torn, corrupt, errors,
	writeBacks, prefetches, dropped, belowThreshold, noQuota, notAdmitted, allPinned, adopted atomic.Uint64
}

func (c *counters) stats() Stats {
	return Stats{
		Hits: c.hits.Load(), Misses: c.misses.Load(), BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
		Stored: c.stored.Load(), Known: c.known.Load(), Evicted: c.evicted.Load(), Expired: c.expired.Load(),
		Torn: c.torn.Load(), Corrupt: c.corrupt.Load(), Errors: c.errors.Load(), WriteBacks: c.writeBacks.Load(),
		Prefetches: c.prefetches.Load(), Dropped: c.dropped.Load(), BelowThreshold: c.belowThreshold.Load(),
		NoQuota: c.noQuota.Load(), NotAdmitted: c.notAdmitted.Load(), AllPinned: c.allPinned.Load(), Adopted: c.adopted.Load(),
	}
}
