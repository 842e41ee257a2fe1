package nixl

import (
	"context"
	"errors"
	"maps"
	"slices"
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

// tally counts what ranks do.
type tally struct {
	mu                      sync.Mutex
	reads                   map[[3]string]float64 // by mode, transport and result
	bytes                   map[string]float64    // by transport
	descriptors, moved, set float64               // the last two in seconds
	writes                  map[[2]string]float64 // by transport and result
	written                 map[string]float64    // by transport
	writing, revoked        float64               // the first in seconds
	refused                 float64               // connections
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
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.reads == nil {
		t.reads, t.bytes = map[[3]string]float64{}, map[string]float64{}
	}
	t.reads[[3]string{r.mode, r.transport, r.result()}]++
	t.bytes[r.transport] += float64(r.bytes)
	t.descriptors += float64(r.descriptors)
	t.moved += r.took.Seconds()
	t.set += r.post.Seconds()
}

// wrote counts a push on the producer's side.
func (t *tally) wrote(r *read) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.writes == nil {
		t.writes, t.written = map[[2]string]float64{}, map[string]float64{}
	}
	t.writes[[2]string{r.transport, r.result()}]++
	t.written[r.transport] += float64(r.bytes)
	t.writing += r.took.Seconds()
}

// revoke counts a load whose memory was taken away.
func (t *tally) revoke() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.revoked++
}

// refuse counts a consumer for which there was no room.
func (t *tally) refuse() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refused++
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
	return slices.Concat(s.node.tally.stats(), s.node.holds.stats(), s.node.heartbeats.stats(), s.node.layers.stats()), nil
}

func (t *tally) stats() []connector.Stat {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := []connector.Stat{
		{Name: "read_descriptors_total", Value: t.descriptors},
		{Name: "read_seconds_total", Value: t.moved},
		{Name: "post_seconds_total", Value: t.set},
		{Name: "write_seconds_total", Value: t.writing},
		{Name: "revoked_total", Value: t.revoked},
		{Name: "connections_refused_total", Value: t.refused},
	}
	for k, v := range t.writes {
		out = append(out, connector.Stat{Name: "writes_total", Labels: k[:], Value: v})
	}
	for _, k := range slices.Sorted(maps.Keys(t.written)) {
		out = append(out, connector.Stat{Name: "write_bytes_total", Labels: []string{k}, Value: t.written[k]})
	}
	for k, v := range t.reads {
		out = append(out, connector.Stat{Name: "reads_total", Labels: k[:], Value: v})
	}
	for _, k := range slices.Sorted(maps.Keys(t.bytes)) {
		out = append(out, connector.Stat{Name: "read_bytes_total", Labels: []string{k}, Value: t.bytes[k]})
	}
	return out
}

func (h *holds) stats() []connector.Stat {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sweep(h.now())
	return []connector.Stat{
		{Name: "holds_consumed_total", Value: h.consumed},
		{Name: "holds_expired_total", Value: h.expired},
		{Name: "late_questions_total", Value: h.late},
		{Name: "open_holds", Value: float64(len(h.open))},
	}
}

func (p *heartbeats) stats() []connector.Stat {
	p.mu.Lock()
	defer p.mu.Unlock()
	return []connector.Stat{
		{Name: "heartbeats_total", Labels: []string{"ok"}, Value: p.sent},
		{Name: "heartbeats_total", Labels: []string{"failed"}, Value: p.failed},
	}
}
