package kvevents

// Order puts the batches of one connection to a publisher in order, and tells its sink what is missing. It has no clock and
// no network: a Subscription drives it, and a simulation can. Each connection needs a new one.
type Order struct {
	Sink  Sink
	Count func(what Counted, n int)

	begun bool   // something was applied
	knows bool   // the sink was told from where on it knows
	next  uint64 // the number of the next batch to apply
	seen  uint64 // one more than the last live number
}

// Next is the number of the next batch to apply, with which a replay begins.
func (o *Order) Next() uint64 { return o.next }

// Live takes a batch that was just published. read gives its events, and is called if the batch is new. fill is called if
// batches before it are missing: it asks for a replay and gives what comes to Replayed. Without replays it is nil. The
// error is that of fill.
func (o *Order) Live(seq uint64, read func() ([]Event, error), fill func() error) error {
	if seq < o.seen { // the publisher has started again, behind a connection that went on
		o.lost()
		o.next = 0
	}
	o.seen = seq + 1
	if seq > o.next && (o.begun || fill != nil) {
		o.Count(CountedGaps, 1)
		if fill != nil {
			if err := fill(); err != nil {
				return err
			}
		}
	}
	if seq > o.next {
		o.lost()
		o.next = seq
	}
	if seq == o.next { // else a replay had it
		o.apply(read)
	}
	return nil
}

// Replayed takes a batch of a replay.
func (o *Order) Replayed(seq uint64, read func() ([]Event, error)) {
	if seq < o.next {
		return
	}
	if seq > o.next { // the publisher has no more what is in between
		o.lost()
		o.next = seq
	}
	o.apply(read)
	o.Count(CountedReplayed, 1)
}

// Close takes note that the connection has ended: what is published until the next one may be missed.
func (o *Order) Close() {
	if o.begun {
		o.Sink.Lost()
		o.Count(CountedLost, 1)
	}
}

// apply takes the next batch. One that cannot be read is missing from then on: asking for it again would not help.
func (o *Order) apply(read func() ([]Event, error)) {
	events, err := read()
	if err != nil {
		o.Count(CountedInvalid, 1)
		o.lost()
		o.next++
		return
	}
	if !o.knows {
		o.Sink.From(o.next)
	}
	o.begun, o.knows = true, true
	o.next++
	o.Count(CountedEvents, len(events))
	o.Sink.Apply(events)
}

// lost says that events are missing, if there is anything that this makes doubtful.
func (o *Order) lost() {
	if o.begun {
		o.Sink.Lost()
		o.Count(CountedLost, 1)
	}
	o.knows = false
}
