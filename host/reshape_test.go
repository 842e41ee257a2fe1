package host

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
	"github.com/kvport/kvport/verify/testkit"
)

// cutHeads are those of all ranks together.
const cutHeads = 8

// cuts opens an engine of a shape of its own that can reshape. prompt are the addresses of its only prompt's first
// tokens in blocks of 16.
func cuts(t *testing.T, shape string, prompt []connector.BlockKey, base string) *rig {
	t.Helper()
	return cutsWith(t, shape, prompt, base, rigOptions{})
}

func cutsWith(t *testing.T, shape string, prompt []connector.BlockKey, base string, o rigOptions) *rig {
	t.Helper()
	if o.extra == nil {
		o.extra = map[string]any{"fault": "reshape"}
	}
	o.engine, o.shape = shape, shape
	more := o.change
	o.change = func(e *Engine) {
		for i := range e.Layout.Segments[:2] {
			e.Layout.Segments[i].Planes, e.Layout.Segments[i].Heads = 1, cutHeads/max(1, o.ranks)
		}
		if more != nil {
			more(e)
		}
		if base == "" {
			return
		}
		e.Base = connector.NewFingerprint(base)
		e.Addresses = func(request connector.RequestID, blockTokens, tokens int) []connector.BlockKey {
			if request != "" && blockTokens == 16 && tokens <= 16*len(prompt) {
				return prompt[:(tokens+15)/16]
			}
			return nil
		}
	}
	return newRig(t, o)
}

// wide gives an engine blocks of 16*n tokens, with as many bytes of each token on all of its ranks together as an engine
// with ranks that many has.
func wide(t *testing.T, n, ranks int) func(*Engine) {
	return func(e *Engine) {
		l := connector.Layout{
			Name: "test", Blocks: numBlocks, Groups: []connector.Group{{BlockTokens: 16 * n, Policy: connector.PolicyAll}},
		}
		size := int64(512 * n * ranks / len(e.Ranks))
		for layer := range 2 {
			l.Segments = append(l.Segments, connector.Segment{
				Layer: layer, Offset: int64(layer) * size * numBlocks, BlockStride: size, Bytes: size, Planes: 1, Heads: cutHeads / len(e.Ranks),
			})
		}
		layout, bytes := WithDigests(l)
		e.Layout = layout
		for i := range e.Ranks {
			r, err := NewRegion(bytes)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, r.Close()) })
			e.Ranks[i] = r
		}
	}
}

// TestReshapeTicket: a ticket of another shape is accepted from and by engines that can reshape, for the same
// prompt; a weak hold's never.
func TestReshapeTicket(t *testing.T) {
	ks, others := keys(1, 2), keys(2, 2)
	p := cuts(t, "p", nil, "base")
	p.save("a", ks, 0)
	ticket := p.end("a", 33, true, blocksOf(ks, 0)...).Ticket
	require.NotNil(t, ticket)
	d := cuts(t, "d", ks, "base")
	require.Equal(t, connector.Match{Tokens: 32, Async: true}, d.match(query("x", others), ticket), "its own keys are others")
	for name, c := range map[string]struct {
		d *rig
	}{
		"another prompt": {cuts(t, "e", others, "base")},
		"another base":   {cuts(t, "f", ks, "other base")},
		"no base":        {cuts(t, "g", ks, "")},
	} {
		require.Equal(t, connector.Match{}, c.d.match(query("x", others), ticket), name)
		require.InDelta(t, 1, c.d.metric("kvport_tickets_refused_total"), 0, name)
	}
	weak := p.turn("b", 32, blocksOf(ks, 0)...)
	require.NotNil(t, weak)
	require.Equal(t, connector.Match{}, d.match(query("y", others), weak))
	require.InDelta(t, 1, d.metric("kvport_tickets_refused_total"), 0)

	plain := cuts(t, "h", nil, "")
	plain.save("a", ks, 0)
	of := plain.end("a", 33, true, blocksOf(ks, 0)...).Ticket
	require.Equal(t, connector.Match{}, d.match(query("z", others), of))
	require.InDelta(t, 2, d.metric("kvport_tickets_refused_total"), 0)
}

// loadCut has an engine ask for the first tokens of a prompt with a ticket of another shape, and load them into its blocks from first on.
func (r *rig) loadCut(id connector.RequestID, ticket []byte, own []connector.BlockKey, tokens int, first connector.BlockID) connector.Transfer {
	r.t.Helper()
	q := connector.Query{Request: id, Tokens: tokens + 2, Keys: own}
	require.Equal(r.t, tokens, r.match(q, ticket).Tokens)
	tr := connector.Transfer{Request: id, Tokens: tokens, Blocks: blocksOf(own, first)}
	r.send(&connector.Step{Arrived: []connector.Query{q}, Admitted: []connector.Transfer{tr}})
	return tr
}

// handed is a prompt of some full blocks of 16 tokens that a producer with some ranks holds.
func handed(t *testing.T, ranks, blocks int) (p *rig, ks []connector.BlockKey, ticket []byte) {
	t.Helper()
	ks = keys(1, blocks)
	p = cutsWith(t, "p", nil, "base", rigOptions{ranks: ranks})
	tr, rng := transfer("a", ks, 0), rand.New(rand.NewPCG(146, uint64(ranks)))
	p.each(tr.Blocks, func(view, _ []byte) {
		for i := range view {
			view[i] = byte(rng.Uint32())
		}
	})
	p.send(&connector.Step{Arrived: []connector.Query{query("a", ks)}, Computed: []connector.Transfer{tr}})
	require.Empty(t, p.next(Saved).Failed)
	ticket = p.end("a", 16*blocks, true, blocksOf(ks, 0)...).Ticket
	require.NotNil(t, ticket)
	return p, ks, ticket
}

// token is one token's bytes in a layer, of all ranks together.
func (r *rig) token(segment, token int, blocks []connector.Block) []byte {
	size := r.eng.Layout.Groups[0].BlockTokens
	var all []byte
	for _, kv := range r.kvs {
		view := kv.View(segment, blocks[token/size].ID)
		row := len(view) / size
		all = append(all, view[token%size*row:][:row]...)
	}
	return all
}

// prompt is where an engine has one.
type prompt struct {
	*rig
	blocks []connector.Block
}

// sameAs compares what two engines have of a prompt.
func (p prompt) sameAs(o prompt, tokens int) {
	p.t.Helper()
	for segment := range 2 {
		for token := range tokens {
			require.Equal(p.t, p.token(segment, token, p.blocks), o.token(segment, token, o.blocks), "layer %d, token %d", segment, token)
		}
	}
}

// TestReshapeLoads: whole blocks of a producer are read, checked by its digests and cut into ours, in place and at trust
// level staged, at once and in parts. What came is as good as what was computed: it has digests of ours, and is handed on.
func TestReshapeLoads(t *testing.T) {
	for name, c := range map[string]struct {
		theirs, ours, width int // ranks, and how many of their blocks one of ours has
		settings            map[string]any
		role                string
	}{
		"wider blocks":          {1, 1, 4, nil, "kv_both"},
		"more ranks":            {1, 4, 1, nil, "kv_both"},
		"fewer ranks":           {8, 2, 2, nil, "kv_both"},
		"in parts":              {4, 1, 2, map[string]any{"landing_bytes": 4 * 1300}, "kv_both"},
		"staged":                {2, 1, 2, map[string]any{"trust": "staged", "sandbox": "off", "landing_bytes": landingBytes(24)}, "kv_consumer"},
		"unverified is nothing": {1, 2, 2, map[string]any{"unverified": true}, "kv_both"},
	} {
		t.Run(name, func(t *testing.T) {
			p, ks, ticket := handed(t, c.theirs, 8)
			d := cutsWith(t, "d", ks, "base", rigOptions{ranks: c.ours, role: c.role, settings: c.settings, change: wide(t, c.width, c.theirs)})
			own := keys(2, 8/c.width)
			tr := d.loadCut("x", ticket, own, 128, 20)
			e := d.next(Loaded)
			require.NoError(t, e.Err)
			require.Empty(t, e.Failed)
			require.False(t, e.Unverified)
			prompt{p, blocksOf(ks, 0)}.sameAs(prompt{d, tr.Blocks}, 128)
			for _, rank := range d.Host.ranks {
				for _, b := range tr.Blocks {
					require.NoError(t, rank.hasher.Check(rank.kv, b), "it has digests of its own")
				}
			}
			require.Zero(t, d.metric("kvport_unverified_blocks_total"))
			require.Zero(t, d.metric("kvport_integrity_failures_total"))
			if c.role == "kv_both" {
				require.NotNil(t, d.end("x", 128, true, tr.Blocks...).Ticket, "it may be handed on")
			}
		})
	}
}

// TestReshapeDamage: a byte that changed in one block of one rank of the producer costs the blocks that are cut from it,
// and no other. The log says which block, rank and layer it was.
func TestReshapeDamage(t *testing.T) {
	p, ks, ticket := handed(t, 2, 8)
	log := &testkit.Log{}
	d := cutsWith(t, "d", ks, "base", rigOptions{change: wide(t, 2, 2), log: slog.New(slog.NewTextHandler(log, nil))})
	path := filepath.Join(p.dir, ks[5].String()+".1")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	data[600] ^= 1 // in the second layer
	require.NoError(t, os.WriteFile(path, data, 0o600))
	require.NoError(t, os.Remove(filepath.Join(p.dir, ks[7].String()+".0")))
	own := keys(2, 4)
	tr := d.loadCut("x", ticket, own, 128, 20)
	e := d.next(Loaded)
	require.ElementsMatch(t, []connector.BlockID{22, 23}, e.Failed)
	prompt{p, blocksOf(ks, 0)}.sameAs(prompt{d, tr.Blocks}, 64)
	require.InDelta(t, 1, d.metric("kvport_integrity_failures_total"), 0)
	require.ErrorIs(t, errors.Join(e.Err), connector.ErrGone)
	require.Contains(t, log.String(), "block 5 of the prompt, as rank 1 of 2 of the producer has it (16 tokens)")
	require.Contains(t, log.String(), "layer 1: digest differs")
	for _, b := range slices.Concat(tr.Blocks[2:]) {
		require.ErrorIs(t, d.Host.ranks[0].hasher.Check(d.Host.ranks[0].kv, b), connector.ErrCorrupt, "what failed gets no digests")
	}
}

// TestReshapeRefusesWhatCannotBeCut (rule RESHAPE-04).
func TestReshapeRefusesWhatCannotBeCut(t *testing.T) {
	h := cuts(t, "d", nil, "base").Host
	for why, s := range map[string]tracker.Source{
		"8 heads on 3 ranks there":                   {World: 3, BlockTokens: 16},
		"8 heads on 0 ranks there":                   {BlockTokens: 16},
		"neither is a multiple of the other":         {World: 1, BlockTokens: 24},
		"blocks of -16 tokens, 1 planes and 8 heads": {World: 1, BlockTokens: -16},
	} {
		_, err := h.cutterOf(&s)
		require.ErrorIs(t, err, connector.ErrIncompatible, why)
		require.ErrorContains(t, err, why)
	}
}

// TestReshapeNeedsRoom: a block that the memory for it cannot hold is refused with its ticket, and the reason names the
// setting.
func TestReshapeNeedsRoom(t *testing.T) {
	_, ks, ticket := handed(t, 1, 2)
	log := &testkit.Log{}
	d := cutsWith(t, "d", ks, "base", rigOptions{settings: map[string]any{"landing_bytes": 4000}, log: slog.New(slog.NewTextHandler(log, nil))})
	require.Equal(t, connector.Match{}, d.match(query("x", keys(2, 2)), ticket))
	require.Contains(t, log.String(), "kvport.landing_bytes")
}

// TestUnverifiedIsNotNeeded: the setting is taken with a warning, once.
func TestUnverifiedIsNotNeeded(t *testing.T) {
	for _, config := range []string{
		`{"kv_connector": "X", "kv_role": "kv_both", "kvport": {"unverified": true}}`,
		`{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kvport": {"unverified": true},
		  "kv_connector_extra_config": {"connectors": [{"kv_connector": "X", "kv_role": "kv_both"}]}}`,
	} {
		c, err := ParseConfig(config)
		require.NoError(t, err)
		require.Len(t, c.Warnings, 1)
		require.True(t, strings.HasPrefix(c.Warnings[0], "kvport.unverified: is not needed"), c.Warnings[0])
	}
}

// TestReshapeMulti: a child of a MultiConnector that can reshape brings all of a ticket of another shape; others are not
// asked.
func TestReshapeMulti(t *testing.T) {
	ks := keys(1, 8)
	kids := func(dir string) []map[string]any {
		return []map[string]any{kid(map[string]any{"dir": t.TempDir()}, nil, nil), kid(map[string]any{"dir": dir, "fault": "reshape"}, nil, nil)}
	}
	change := func(n int) func(*Engine) {
		return func(e *Engine) {
			wide(t, n, 1)(e)
			e.Base, e.Addresses = connector.NewFingerprint("base"), func(_ connector.RequestID, blockTokens, tokens int) []connector.BlockKey {
				if blockTokens != 16 || tokens > 128 {
					return nil
				}
				return ks[:(tokens+15)/16]
			}
		}
	}
	dir := t.TempDir()
	p := multiRigWith(t, rigOptions{engine: "p", shape: "p", change: change(1)}, kids(dir)...)
	tr := transfer("a", ks, 0)
	p.fill(tr.Blocks)
	p.send(&connector.Step{Arrived: []connector.Query{query("a", ks)}, Computed: []connector.Transfer{tr}})
	require.Empty(t, p.next(Saved).Failed)
	ticket := p.end("a", 128, true, tr.Blocks...).Ticket
	require.NotNil(t, ticket)
	d := multiRigWith(t, rigOptions{engine: "d", shape: "d", change: change(4)}, kids(t.TempDir())...)
	own := keys(2, 2)
	d.loadCut("x", ticket, own, 128, 20)
	require.NoError(t, d.next(Loaded).Err)
	prompt{p, tr.Blocks}.sameAs(prompt{d, blocksOf(own, 20)}, 128)
}

// TestReshapeHashers: the keys of an engine of another shape are derived once, and not of more engines than there may be.
func TestReshapeHashers(t *testing.T) {
	h := cuts(t, "d", nil, "base").Host
	src := tracker.Source{Shape: connector.NewFingerprint("p"), World: 4}
	first := h.hashersOf(&src)
	require.Len(t, first, 4)
	require.Same(t, first[3], h.hashersOf(&src)[3])
	more := src
	more.World = 2
	require.Len(t, h.hashersOf(&more), 2)
	for i := range 5 * maxShapes {
		more.Shape = connector.NewFingerprint(fmt.Sprint(i))
		h.hashersOf(&more)
		require.LessOrEqual(t, len(h.others.of), maxShapes)
	}
}

// TestReshapeNamesSlots: the blocks that a plugin's error names are slots of the memory that it reads into. Whatever
// numbers it gives, none of them reaches the cache's blocks, where one would fail and the others count as loaded.
func TestReshapeNamesSlots(t *testing.T) {
	_, ks, ticket := handed(t, 1, 4)
	own := keys(2, 2)
	for _, at := range []connector.BlockID{4, 3} { // one of our two blocks has the number that it gives
		d := cutsWith(t, "d", ks, "base", rigOptions{change: wide(t, 2, 1), extra: map[string]any{"fault": "reshape_elsewhere"}})
		d.loadCut("x", ticket, own, 64, at)
		e := d.next(Loaded)
		require.Equal(t, e.Blocks, e.Failed, "nothing was cut")
		require.ErrorIs(t, e.Err, connector.ErrIncompatible)
		require.InDelta(t, 1, d.metric("kvport_plugin_violations_total"), 0)
	}
}

// TestReshapeDigestMisses: blocks of a producer whose digests cannot be checked here are counted by reason, as those of a
// store are, and logged with the remedy. They get no digests of ours.
func TestReshapeDigestMisses(t *testing.T) {
	p, ks, ticket := handed(t, 1, 8)
	log := &testkit.Log{}
	d := cutsWith(t, "d", ks, "base", rigOptions{change: wide(t, 2, 1), log: slog.New(slog.NewTextHandler(log, nil))})
	header := func(block, at int, value byte) {
		path := filepath.Join(p.dir, ks[block].String()+".0")
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		data[len(data)-int(p.eng.Layout.Segments[2].Bytes)+at] ^= value
		require.NoError(t, os.WriteFile(path, data, 0o600))
	}
	header(1, 0, 0x40) // the edition
	header(5, 8, 1)    // the key
	own := keys(2, 4)
	tr := d.loadCut("x", ticket, own, 128, 20)
	e := d.next(Loaded)
	require.ElementsMatch(t, []connector.BlockID{20, 22}, e.Failed)
	require.InDelta(t, 1, d.misses("edition"), 0)
	require.InDelta(t, 1, d.misses("foreign_key"), 0)
	require.Zero(t, d.metric("kvport_integrity_failures_total"))
	require.Contains(t, log.String(), `seen="[edition 66]"`)
	require.Contains(t, log.String(), "stored with a key that is not in the ring")
	for _, i := range []int{0, 2} {
		require.Error(t, d.Host.ranks[0].hasher.Check(d.Host.ranks[0].kv, tr.Blocks[i]), "what failed gets no digests")
	}
}

// TestReshapeBusy: a load of which one block is busy is asked for again as a whole, before the producer hears that all of
// it is read.
func TestReshapeBusy(t *testing.T) {
	p, ks, ticket := handed(t, 2, 4)
	d := cutsWith(t, "d", ks, "base", rigOptions{change: wide(t, 2, 2), extra: map[string]any{"fault": "reshape_busy", "at": 1, "once": true}})
	own := keys(2, 2)
	tr := d.loadCut("x", ticket, own, 64, 20)
	require.NoError(t, d.next(Loaded).Err)
	prompt{p, blocksOf(ks, 0)}.sameAs(prompt{d, tr.Blocks}, 64)
}

// TestReshapeHiddenFence: a plugin that left somebody behind costs its blocks of the cache, and the next one reads source
// blocks into other memory, also in place.
func TestReshapeHiddenFence(t *testing.T) {
	p, ks, ticket := handed(t, 1, 4)
	dir, _ := park(t)
	o := hiding(dir, "300ms")
	o.extra["fault"], o.change = "reshape_hide_fence", wide(t, 2, 1)
	d := cutsWith(t, "d", ks, "base", o)
	old, own := d.sources, keys(2, 2)
	d.loadCut("x", ticket, own, 64, 20)
	require.True(t, d.next(Loaded).Lost)
	d.becomes("degraded")
	require.NotSame(t, old, d.sources)
	require.Same(t, d.sources, d.src.sources)
	d.loadCut("y", p.end("b", 64, true, blocksOf(ks, 0)...).Ticket, own, 64, 30)
	require.NoError(t, d.next(Loaded).Err)
	prompt{p, blocksOf(ks, 0)}.sameAs(prompt{d, blocksOf(own, 30)}, 64)
}

// TestWholeErrors: an error that fails a whole load keeps its class and names no block.
func TestWholeErrors(t *testing.T) {
	err := error(whole{&connector.BlockError{Blocks: []connector.BlockID{1}, Err: connector.ErrGone}})
	require.ErrorIs(t, err, connector.ErrGone)
	_, is := errors.AsType[*connector.BlockError](err)
	require.False(t, is)
}
