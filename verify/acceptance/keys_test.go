package acceptance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"

	"github.com/kvport/kvport/verify/testkit"
)

// identity is everything that decides whether two requests may share blocks.
type identity struct {
	model, weights, dtype string // make Env.Model
	layout, isa           string // and the two below make Env.Shape
	block, world          int
	group                 bool // blocks of the second group are there too
	space                 connector.KeySpace
}

func usual() identity {
	return identity{
		model: "model", weights: "weights", dtype: "f32", layout: "layers", isa: "avx2", block: 16, world: 1, group: true,
		space: connector.KeySpace{Salt: "salt", LoRAName: "adapter", LoRAContent: "adapter weights", Multimodal: []string{"image"}},
	}
}

// dimension changes an identity in one way. Those with ticket are told by the ticket too.
type dimension struct {
	name   string
	ticket bool
	change func(i *identity)
}

func dimensions() []dimension {
	return []dimension{
		{"model", true, func(i *identity) { i.model = "another" }},
		{"weights", true, func(i *identity) { i.weights = "fine-tuned" }},
		{"dtype", true, func(i *identity) { i.dtype = "f16" }},
		{"layout", true, func(i *identity) { i.layout = "interleaved" }},
		{"ISA", true, func(i *identity) { i.isa = "avx512" }},
		{"parallelism", true, func(i *identity) { i.world = 2 }},
		{"group", false, func(i *identity) { i.group = false }},
		{"salt", false, func(i *identity) { i.space.Salt = "another tenant" }},
		{"LoRA name", false, func(i *identity) { i.space.LoRAName = "another" }},
		{"LoRA content", false, func(i *identity) { i.space.LoRAContent = "trained on" }},
		{"multimodal", false, func(i *identity) { i.space.Multimodal = []string{"another image"} }},
		{"block size", true, func(i *identity) { i.block = 32 }},
	}
}

const (
	keyPrompt = 128     // tokens
	keySlots  = 64      // blocks of a cache
	stranger  = "other" // the engine that differs
)

// keys are those of a prompt: by our own chain, or made of an engine's own hashes as `kvport agent` does. Hashes of
// vLLM cover tokens, adapter, images and salt; model and salt come from us.
func (i *identity) keys(foreign bool) []connector.BlockKey {
	space := i.space
	space.Model = i.modelPrint()
	tokens := make([]int32, keyPrompt)
	if !foreign {
		return space.Keys(tokens, i.block)
	}
	own := i.space
	space = connector.KeySpace{Model: space.Model, Salt: own.Salt}
	var keys []connector.BlockKey
	for _, k := range own.Keys(tokens, i.block) {
		hash := sha256.Sum256(k[:])
		keys = append(keys, space.Foreign("vllm/sha256_cbor", hash[:]))
	}
	return keys
}

func (i *identity) modelPrint() connector.Fingerprint {
	return connector.NewFingerprint("key matrix", i.model, i.weights, i.dtype)
}

// engine is a host with the memory of a cache around it.
type keyEngine struct {
	*testing.T
	*host.Host
	identity identity
	groups   int
	kvs      []*connector.KV
	metrics  *prometheus.Registry
	step     uint64
	closed   bool
}

// openKeys opens a connector for an engine. A nil engine comes with the reason of a refusal.
func openKeys(t *testing.T, f *scene, b backend, i identity, name string) (*keyEngine, error) {
	t.Helper()
	e := &keyEngine{T: t, identity: i, groups: 1, metrics: prometheus.NewRegistry()}
	if f.Groups {
		e.groups = 2
	}
	later := "1m"
	if name == stranger {
		later = "300ms" // it is to find nothing, and a ticket for another prompt makes it wait for that
	}
	settings := fmt.Sprintf(`"deadlines":{"handshake":"30s","later":%q,"plan":"1m","transfer":"1m","save":"1m","finish":"1m"},"heartbeat":{"limit":"1m"}`, later)
	cfg, err := host.ParseConfig(f.config("kv_both", name, f.extra(t, b, "kv_both"), settings))
	require.NoError(t, err)
	layout, size := host.WithDigests(e.layout())
	eng := host.Engine{
		Model: i.modelPrint(), Layout: layout,
		Shape: connector.NewFingerprint("key matrix shape", i.layout, i.isa, strconv.Itoa(i.block), strconv.Itoa(i.world)),
	}
	for range i.world {
		region, err := host.NewRegion(size)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, region.Close()) })
		kv, err := connector.NewKV(layout, [][]byte{region.Bytes()})
		require.NoError(t, err)
		eng.Ranks, e.kvs = append(eng.Ranks, region), append(e.kvs, kv)
	}
	e.Host, err = host.Open(t.Context(), cfg, eng, host.Options{PluginPath: pluginFolders(t), Metrics: e.metrics})
	if err != nil {
		return nil, err
	}
	t.Cleanup(e.close)
	return e, nil
}

// pluginFolders are those of the children of a MultiConnector.
func pluginFolders(t *testing.T) []string { return []string{testkit.Root(t) + "/bin"} }

// layout has two layers a group, one after the other or interleaved.
func (e *keyEngine) layout() connector.Layout {
	l := connector.Layout{Name: e.identity.layout, Blocks: keySlots}
	bytes := int64(e.identity.block) * 32
	for g := range e.groups {
		l.Groups = append(l.Groups, connector.Group{BlockTokens: e.identity.block, Policy: connector.PolicyAll})
		for layer := range 2 {
			s := connector.Segment{Layer: 2*g + layer, Group: uint16(g), Offset: int64(2*g+layer) * bytes * keySlots, BlockStride: bytes, Bytes: bytes}
			if e.identity.layout != usual().layout {
				s.Offset, s.BlockStride = int64(2*g)*bytes*keySlots+int64(layer)*bytes, 2*bytes
			}
			l.Segments = append(l.Segments, s)
		}
	}
	return l
}

func (e *keyEngine) close() {
	if e.closed {
		return
	}
	e.closed = true
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range e.Events() {
		}
	}()
	err := e.Close(context.WithoutCancel(e.Context()))
	<-done
	require.NoError(e, err)
}

// next waits for an event.
func (e *keyEngine) next(kind host.EventKind, id connector.RequestID) host.Event {
	e.Helper()
	timeout := time.NewTimer(5 * time.Minute)
	defer timeout.Stop()
	for {
		select {
		case event, open := <-e.Events():
			require.True(e, open)
			if event.Kind == kind && event.Request == id {
				return event
			}
		case <-timeout.C:
			require.FailNow(e, "no event", "of kind %d for %s", kind, id)
		}
	}
}

// send gives the host a step.
func (e *keyEngine) send(s *connector.Step) {
	e.step++
	s.ID = e.step
	e.Step(s)
}

// transfer has all blocks of a prompt, in one group or all of them.
func (e *keyEngine) transfer(id string, keys []connector.BlockKey, groups int) connector.Transfer {
	t := connector.Transfer{Request: connector.RequestID(id), Tokens: len(keys) * e.identity.block}
	for g := range groups {
		for n, k := range keys {
			t.Blocks = append(t.Blocks, connector.Block{Key: k, ID: connector.BlockID(g*len(keys) + n), Group: uint16(g)})
		}
	}
	return t
}

// each visits the memory of blocks with what belongs there: it differs with the engine, key, rank and layer.
func (e *keyEngine) each(blocks []connector.Block, visit func(span, want []byte)) {
	for rank, kv := range e.kvs {
		for _, b := range blocks {
			for _, s := range kv.Segments(b.Group) {
				if kv.Layout().Segments[s].Layer == connector.DigestLayer {
					continue
				}
				span := kv.View(s, b.ID)
				seed := sha256.Sum256(fmt.Appendf(nil, "%+v %v %d %d %d", e.identity, b.Key, rank, kv.Layout().Segments[s].Layer, b.Group))
				want := bytes.Repeat(seed[:], len(span)/len(seed))
				visit(span, want)
			}
		}
	}
}

// offer saves a prompt, ends its request and gives the ticket.
func (e *keyEngine) offer(id string, keys []connector.BlockKey, groups int) []byte {
	e.Helper()
	t := e.transfer(id, keys, groups)
	e.each(t.Blocks, func(span, want []byte) { copy(span, want) })
	q := connector.Query{Request: t.Request, Tokens: t.Tokens + 1, Keys: keys}
	e.send(&connector.Step{Arrived: []connector.Query{q}, Computed: []connector.Transfer{t}})
	saved := e.next(host.Saved, t.Request)
	require.Empty(e, saved.Failed, "%v", saved.Err)
	e.send(&connector.Step{Ended: []connector.Ended{{Request: t.Request, Reason: connector.ReasonLength, Tokens: t.Tokens, Remote: true, Blocks: t.Blocks}}})
	return e.next(host.Finished, t.Request).Ticket
}

// hits asks what could be loaded, in blocks, and then loads all of it in any case: blocks that arrive count too.
func (e *keyEngine) hits(id string, keys []connector.BlockKey, ticket []byte) (offered, loaded, right int) {
	e.Helper()
	t := e.transfer(id, keys, e.groups)
	q := connector.Query{Request: t.Request, Tokens: t.Tokens + 1, Keys: keys}
	e.send(&connector.Step{Arrived: []connector.Query{q}})
	m := e.Match(q, ticket)
	for m.Later {
		e.next(host.Answered, t.Request)
		m = e.Match(q, ticket)
	}
	offered = m.Tokens / e.identity.block
	e.each(t.Blocks, func(span, _ []byte) { clear(span) })
	e.send(&connector.Step{Admitted: []connector.Transfer{t}})
	event := e.next(host.Loaded, t.Request)
	failed := map[connector.BlockID]bool{}
	for _, b := range event.Failed {
		failed[b] = true
	}
	for _, b := range t.Blocks {
		if failed[b.ID] {
			continue
		}
		loaded++
		same := true
		e.each([]connector.Block{b}, func(span, want []byte) { same = same && bytes.Equal(span, want) })
		if same {
			right++
		}
	}
	e.send(&connector.Step{Ended: []connector.Ended{{Request: t.Request, Reason: connector.ReasonLength, Tokens: t.Tokens}}})
	e.next(host.Finished, t.Request)
	return offered, loaded, right
}

// counter is a metric's sum over its labels.
func (e *keyEngine) counter(name string) (sum float64) {
	families, err := e.metrics.Gather()
	require.NoError(e, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// keyRow is what one connector did.
type keyRow struct {
	connector string
	cells     []string // one a dimension: blocks offered and loaded
	controls  int      // blocks that engines that differ in nothing have loaded, all right
	refused   int      // tickets
}

// TestKeyMatrix: two engines that differ in one thing only never share a block, through every connector that is found,
// whatever they are asked for and whatever ticket they bring; two that differ in nothing do. Each connector meets a quarter
// of the differences, the three after it in the list the others, and in soak, or alone, it meets all of them.
func TestKeyMatrix(t *testing.T) {
	if testing.Short() {
		t.Skip("starts hundreds of plugins: left out with -short, which the race stage uses")
	}
	b := newBackend(t)
	all := scenes(t)
	rows := make([]keyRow, len(all))
	t.Run("connectors", func(t *testing.T) {
		for i, f := range all {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel() // most of the time they wait
				every, first := 4, i%4
				if os.Getenv("KVPORT_SOAK") != "" || len(all) == 1 {
					every, first = 1, 0
				}
				rows[i] = keyMatrix(t, &f, b.under(t, f.name), func(n int) bool { return n%every == first })
			})
		}
	})
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\nblocks offered+loaded of 16 or 32\tcontrol\ttickets refused")
	for _, d := range dimensions() {
		fmt.Fprint(w, "\t", d.name)
	}
	for _, r := range rows {
		fmt.Fprintf(w, "\n%s\t%d\t%d\t%s", r.connector, r.controls, r.refused, strings.Join(r.cells, "\t"))
	}
	require.NoError(t, w.Flush())
	t.Log(out.String())
}

// keyScene is one connector's part of the matrix.
type keyScene struct {
	*testing.T
	f       *scene
	b       backend
	base    *keyEngine
	tickets int
	row     keyRow
}

// keyMatrix runs the differences that meets picks by their number.
func keyMatrix(t *testing.T, f *scene, b backend, meets func(n int) bool) keyRow {
	s := &keyScene{T: t, f: f, b: b, row: keyRow{connector: f.name}}
	base, err := openKeys(t, f, b, usual(), "base")
	require.NoError(t, err)
	s.base = base
	half := identity{}
	for _, foreign := range []bool{false, true} {
		whole := usual()
		base.offer(fmt.Sprint("whole ", foreign), whole.keys(foreign), base.groups)
		half = usual()
		half.space.Multimodal = []string{"half"}
		base.offer(fmt.Sprint("half ", foreign), half.keys(foreign), 1)
	}
	s.requests() // inside one engine
	if !f.Peers && !f.Pairs {
		base.close() // what it keeps for others is written by then
	}
	s.control()
	for n, d := range dimensions() {
		cell := "-"
		if meets(n) {
			cell = s.differs(d, half)
		}
		s.row.cells = append(s.row.cells, cell)
	}
	s.control() // none of the others has taken anything away
	return s.row
}

// ticket makes the engine that has the blocks offer a prompt once more, if it still runs.
func (s *keyScene) ticket(keys []connector.BlockKey, groups int) []byte {
	s.tickets++
	if s.base.closed {
		return nil
	}
	return s.base.offer(fmt.Sprint("again ", s.tickets), keys, groups)
}

// requests differ in what a request says, inside the engine that has the blocks.
func (s *keyScene) requests() {
	for n, d := range dimensions()[7:11] {
		for _, foreign := range []bool{false, true} {
			i := usual()
			d.change(&i)
			offered, loaded, _ := s.base.hits(fmt.Sprint("inside ", n, foreign), i.keys(foreign), nil)
			require.Zero(s, offered+loaded, "%s differs, inside one engine", d.name)
		}
	}
}

// control: an engine that differs in nothing finds all blocks, and they are right.
func (s *keyScene) control() {
	e, err := openKeys(s.T, s.f, s.b, usual(), "control")
	require.NoError(s, err)
	defer e.close()
	for _, foreign := range []bool{false, true} {
		i := usual()
		keys := i.keys(foreign)
		offered, loaded, right := e.hits(fmt.Sprint("control ", foreign), keys, s.ticket(keys, s.base.groups))
		require.Equal(s, len(keys), offered, "offered, foreign %t", foreign)
		require.Equal(s, len(keys)*e.groups, loaded, "loaded, foreign %t", foreign)
		require.Equal(s, loaded, right, "right, foreign %t", foreign)
		s.row.controls += loaded
	}
}

// differs opens an engine that differs in one thing. It asks for the blocks, and then saves its own under its own keys.
func (s *keyScene) differs(d dimension, half identity) string {
	if d.name == "group" && !s.f.Groups {
		return s.severalGroups(d)
	}
	i := usual()
	d.change(&i)
	e, err := openKeys(s.T, s.f, s.b, i, stranger)
	if err != nil {
		require.True(s, errors.Is(err, connector.ErrIncompatible) || errors.Is(err, host.ErrConfig), "%s: %v", d.name, err)
		return "refused"
	}
	defer e.close()
	offered, loaded, asked := 0, 0, 0
	for _, foreign := range []bool{false, true} {
		theirs, groups := usual(), s.base.groups
		if d.name == "group" { // the second group of this prompt was never saved
			theirs, groups = half, 1
			i.space = half.space
		}
		ticket := s.ticket(theirs.keys(foreign), groups)
		own := i.keys(foreign)
		o, l, _ := e.hits(fmt.Sprint("own ", foreign), own, ticket)
		if d.name == "group" {
			l -= len(own) // the first group's are there
		}
		offered, loaded, asked = offered+o, loaded+max(l, 0), asked+len(own)
		// Whatever keys it asks with: the connector keeps shapes apart by itself.
		if d.ticket && i.modelPrint() == theirs.modelPrint() && i.block == theirs.block {
			o, l, _ = e.hits(fmt.Sprint("theirs ", foreign), theirs.keys(foreign), nil)
			offered, loaded = offered+o, loaded+l
		}
		if d.name != "group" {
			e.offer(fmt.Sprint("mine ", foreign), own, e.groups)
		}
	}
	require.Zero(s, offered, "%s differs: blocks offered of %d", d.name, asked)
	require.Zero(s, loaded, "%s differs: blocks loaded of %d", d.name, asked)
	if refused := int(e.counter("kvport_tickets_refused_total")); d.ticket && s.f.Pairs {
		require.Equal(s, 2, refused, "%s differs: tickets refused", d.name)
		s.row.refused += refused
	}
	return fmt.Sprintf("%d+%d", offered, loaded)
}

// severalGroups: a connector that knows one group only is not given a cache of two.
func (s *keyScene) severalGroups(d dimension) string {
	two, f := *s.f, *s.f.Fixture
	f.Groups = true
	two.Fixture = &f
	_, err := openKeys(s.T, &two, s.b, usual(), "groups")
	require.Error(s, err, d.name)
	require.ErrorContains(s, err, "2 groups")
	return "refused"
}
