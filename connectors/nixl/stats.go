package nixl

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// StatInfos is what the connector counts.
func StatInfos() []connector.StatInfo {
	counter := func(name, help string, labels ...string) connector.StatInfo {
		return connector.StatInfo{Name: name, Help: help, Kind: connector.Counter, Labels: labels}
	}
	return []connector.StatInfo{
		counter("reads_total", "Loads of a producer's blocks, by mode (pull or push), transport and result.", "mode", "transport", "result"),
		counter("read_bytes_total", "Bytes loaded, by transport.", "transport"),
		counter("read_descriptors_total", "Runs of memory that loads were made of."),
		counter("read_seconds_total", "Time from the post of loads to their end."),
		counter("post_seconds_total", "Time to prepare and post reads."),
		counter("writes_total", "Pushes to consumers, by transport and result.", "transport", "result"),
		counter("write_bytes_total", "Bytes pushed, by transport.", "transport"),
		counter("served_bytes_total", "Bytes that consumers say they have read from this engine, and those that were pushed to them."),
		counter("write_seconds_total", "Time from the post of pushes to their end."),
		counter("revoked_total", "Loads whose memory was taken from a writer that did not say it had ended."),
		counter("connections_refused_total", "Connections of consumers that were refused because all others were being answered."),
		counter("holds_consumed_total", "Holds that consumers have fetched."),
		counter("holds_expired_total", "Holds that ended before a consumer had fetched them."),
		counter("late_questions_total", "Questions about holds that were over, or never were."),
		counter("layer_bytes_total", "Bytes of layers that consumers were told about while the rest was computed."),
		counter("layer_confirmed_bytes_total", "Those of them that consumers have read."),
		counter("layer_early_bytes_total", "Those that they had read when the KV of the last layer was computed."),
		counter("early_blocks_total", "Blocks that were here when their load began."),
		{Name: "subscribers", Help: "Consumers that read layers as they are computed.", Kind: connector.Gauge},
		counter("heartbeats_total", "Signs of life that a consumer sent, by result.", "result"),
		{Name: "open_holds", Help: "Holds that wait for their consumer.", Kind: connector.Gauge},
	}
}

// tally counts what a node does, in the counters of StatInfos.
type tally struct {
	mu     sync.Mutex
	values map[series]float64
}

// series is one value of a counter.
type series struct {
	name   string
	n      int // labels
	labels [3]string
}

func newTally() *tally {
	t := &tally{values: map[series]float64{}}
	for _, info := range StatInfos() {
		if info.Kind == connector.Counter && len(info.Labels) == 0 {
			t.count(info.Name, 0)
		}
	}
	t.count("heartbeats_total", 0, "ok")
	t.count("heartbeats_total", 0, "failed")
	return t
}

// count adds to a counter.
func (t *tally) count(name string, by float64, labels ...string) {
	s := series{name: name, n: len(labels)}
	copy(s.labels[:], labels)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.values[s] += by
}

// read is one transfer, for tally.
type read struct {
	mode        string
	transport   string
	bytes       uint64
	descriptors int
	post, took  time.Duration
	err         error
}

func (t *tally) add(r *read) {
	t.count("reads_total", 1, r.mode, r.transport, r.result())
	t.count("read_bytes_total", float64(r.bytes), r.transport)
	t.count("read_descriptors_total", float64(r.descriptors))
	t.count("read_seconds_total", r.took.Seconds())
	t.count("post_seconds_total", r.post.Seconds())
}

// wrote counts a push on the producer's side.
func (t *tally) wrote(r *read) {
	t.count("writes_total", 1, r.transport, r.result())
	t.count("write_bytes_total", float64(r.bytes), r.transport)
	t.count("served_bytes_total", float64(r.bytes))
	t.count("write_seconds_total", r.took.Seconds())
}

func (r *read) result() string {
	switch {
	case errors.Is(r.err, errStale):
		return "stale"
	case r.err != nil:
		return "failed"
	}
	return "ok"
}

// Stats implements connector.StatsSource.
func (s *scheduler) Stats(context.Context) ([]connector.Stat, error) {
	n := s.node
	stats := []connector.Stat{
		{Name: "open_holds", Value: float64(n.holds.left())},
		{Name: "subscribers", Value: float64(n.layers.readers())},
	}
	n.tally.mu.Lock()
	defer n.tally.mu.Unlock()
	for c, v := range n.tally.values {
		stats = append(stats, connector.Stat{Name: c.name, Labels: c.labels[:c.n], Value: v})
	}
	return stats, nil
}

// left is how many holds are open.
func (h *holds) left() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sweep(h.now())
	return len(h.open)
}

// readers is how many consumers read layers.
func (l *layering) readers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.followers)
}
