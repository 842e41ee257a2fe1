package rig

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

var flagForgeries = flag.Int("forgeries", 0, "forged blocks to read; default 18, in soak 1000")

// Medium is where engines keep blocks that somebody else can write.
type Medium struct {
	// Config is the transfer config of an engine; place tells engines apart that share nothing, and settings is the object kvport.
	Config func(role, place, settings string) string
	Keys   func(place string) []string // of what is stored
	Get    func(place, key string) []byte
	Set    func(place, key string, value []byte)
	Head   int // bytes of a value before the block
	// Whole makes a whole value out of one of another length, of the same key: it mends the head.
	Whole func(value []byte) []byte
}

// ValueHead is the length of the head that connectors of remote stores write before a block.
const ValueHead = 48

// WholeValue is a Medium's Whole for these values: it writes the block's length into the head.
func WholeValue(value []byte) []byte {
	binary.LittleEndian.PutUint64(value[8:], uint64(len(value)-ValueHead))
	return value
}

// digestHeader is the length of what precedes a block's digests.
const digestHeader = 16

// headerOf is the header of digests: edition 2 with a key of a ring, or edition 1.
func headerOf(r *Rig, edition byte, id string) []byte {
	r.Helper()
	key, err := hex.DecodeString(id)
	require.NoError(r, err)
	head := make([]byte, digestHeader)
	head[0] = edition
	copy(head[8:], key)
	return head
}

// forgery is a block as somebody makes it who can write the store and run engines, but does not have the key.
type forgery struct {
	name   string
	reason string // how it is counted: corrupt, foreign_key or edition
	make   func(f *forger) []byte
}

// forger has what a victim and the attacker's own engines have stored under one key, without the heads.
type forger struct {
	*Rig
	rng                        *rand.Rand
	ours, theirs, plain, other []byte // by the victim; by another key; under XXH3; another block of the victim's
	head                       []byte // of digests, the victim's
	at                         int    // where digests begin
}

// flip changes a bit of KV.
func (f *forger) flip(block []byte) []byte {
	block[f.rng.IntN(f.at)] ^= 1 << f.rng.IntN(8)
	return block
}

// named gives a block's digests the victim's header.
func (f *forger) named(block []byte) []byte {
	copy(block[f.at:], f.head)
	return block
}

func forgeries() []forgery {
	return []forgery{
		{"changed", "corrupt", func(f *forger) []byte { return f.flip(f.ours) }},
		{"made by another key, under the name of ours", "corrupt", func(f *forger) []byte { return f.named(f.theirs) }},
		{"made by another key", "foreign_key", func(f *forger) []byte { return f.flip(f.theirs) }},
		{"made under XXH3", "edition", func(f *forger) []byte { return f.flip(f.plain) }},
		{"made under XXH3, under the name of ours", "corrupt", func(f *forger) []byte { return f.named(f.plain) }},
		{"another block", "corrupt", func(f *forger) []byte { return f.other }},
		{"a header of zeros", "corrupt", func(f *forger) []byte { clear(f.ours[f.at:][:digestHeader]); return f.ours }},
		{"reserved bytes", "corrupt", func(f *forger) []byte { f.ours[f.at+1+f.rng.IntN(7)] = 1; return f.ours }},
		{"stored by an earlier version", "edition", func(f *forger) []byte {
			return append(f.ours[:f.at:f.at], f.ours[f.at+digestHeader:]...)
		}},
	}
}

// Ring makes a file with one key and gives the key's id.
func (r *Rig) Ring() (path, id string) {
	r.Helper()
	path = filepath.Join(r.TempDir(), "ring")
	return path, r.Keys(path, "init")[0]
}

// Keys runs kvport keys on a file and gives the ids, the one that signs first.
func (r *Rig) Keys(path string, args ...string) (ids []string) {
	r.Helper()
	out, err := exec.CommandContext(r.Context(), Binary(r.T), append(append([]string{"keys"}, args...), "--format", "json", "--file", path)...).Output()
	require.NoError(r, err, args)
	lines := json.NewDecoder(bytes.NewReader(out))
	for lines.More() {
		var key struct {
			ID string `json:"id"`
		}
		require.NoError(r, lines.Decode(&key))
		ids = append(ids, key.ID)
	}
	require.NotEmpty(r, ids, "%s", out)
	return ids
}

// Forged is how many forged blocks a test has read.
func (r *Rig) Forged() int {
	r.Helper()
	return Count(r.T, "forgeries", *flagForgeries, 18, 1000)
}

// Forgeable are prompts for Forgeries.
func (r *Rig) Forgeable(seed uint64) (prompts []string, want []*cluster.Completion) {
	r.Helper()
	n := Count(r.T, "prompts", *Prompts, 2, 4)
	return r.Unaligned(Texts(r.T, seed, 2*n+2, 500, 900), n)
}

// Unread is what an engine has counted of blocks that it could not use, by reason.
func (r *Rig) Unread(p *cluster.Process) map[string]float64 {
	r.Helper()
	m := r.Metrics(p)
	return map[string]float64{
		"corrupt": m.Sum("kvport_integrity_failures_total"), "foreign_key": m.Sum("kvport_digest_misses_total", `reason="foreign_key"`),
		"edition": m.Sum("kvport_digest_misses_total", `reason="edition"`),
	}
}

// Forgeries has an engine load forged blocks from a medium. Each is counted once, with its reason, and no token is wrong.
func (r *Rig) Forgeries(m *Medium, prompts []string, want []*cluster.Completion) {
	r.Helper()
	all := r.Forged()
	ring, id := r.Ring()
	foreign, _ := r.Ring()
	for place, settings := range map[string]string{
		"victim": fmt.Sprintf(`{"ticket_key_file":%q}`, ring), "foreign": fmt.Sprintf(`{"ticket_key_file":%q}`, foreign), "plain": `{"digest":"xxh3"}`,
	} {
		p := r.Serve(place, m.Config("kv_producer", place, settings))
		for _, prompt := range prompts { // one token: the answer's blocks are not stored
			_, err := r.Client.Complete(r.Context(), p.URL, cluster.Request{Prompt: prompt, MaxTokens: 1})
			require.NoError(r, err)
		}
		r.Idle(p)
		r.Stop(p)
	}
	d := r.Serve("decode", m.Config("kv_consumer", "victim", fmt.Sprintf(`{"ticket_key_file":%q}`, ring)), "--enable-prefix-caching=false")
	t := &trial{Rig: r, m: m, d: d, keys: m.Keys("victim"), head: headerOf(r, 2, id), rng: rand.New(rand.NewPCG(*Seed, 7)), kinds: map[string]int{}}
	require.Greater(r, len(t.keys), 4)
	Same(r.T, "before", want, r.All(d.URL, prompts, 4))
	require.Positive(r, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
	seen, tokens := r.Unread(d), 0
	for n := 0; n < all; {
		batch := min(4, all-n)
		restore := t.forge(n, batch, seen)
		tokens += Compare(r.T, fmt.Sprintf("forged blocks %d-%d", n+1, n+batch), want, r.All(d.URL, prompts, 4))
		n += batch
		require.Equal(r, seen, r.Unread(d), "every forged block that was read is counted once, by its reason: %v", t.kinds)
		restore()
	}
	r.Logf("%d forged blocks of %d kinds, counted %v, %d tokens compared, 0 differ: %v", all, len(t.kinds), seen, tokens, t.kinds)
	Same(r.T, "restored", want, r.All(d.URL, prompts, 4))
	require.Equal(r, seen, r.Unread(d))
	r.NobodyBlamed(d)
}

// NobodyBlamed requires that an engine's plugin was neither taken for wrong nor started again.
func (r *Rig) NobodyBlamed(p *cluster.Process) {
	r.Helper()
	metrics := r.Metrics(p)
	for _, name := range []string{"kvport_plugin_violations_total", "kvport_plugin_restarts_total", "kvport_plugin_breaker_open"} {
		require.Zero(r, metrics.Sum(name), name)
	}
}

// trial is an engine that loads forged blocks.
type trial struct {
	*Rig
	m     *Medium
	d     *cluster.Process
	keys  []string
	head  []byte
	rng   *rand.Rand
	kinds map[string]int
}

// forge replaces a batch of blocks, and adds to want how they must be counted.
func (t *trial) forge(n, batch int, want map[string]float64) (restore func()) {
	t.Helper()
	order, all := t.rng.Perm(len(t.keys)), forgeries()
	whole := map[string][]byte{}
	for i := range batch {
		key, kind := t.keys[order[i]], all[(n+i)%len(all)]
		value := t.m.Get("victim", key)
		block := func(place, key string) []byte { return bytes.Clone(t.m.Get(place, key)[t.m.Head:]) }
		f := &forger{
			Rig: t.Rig, rng: t.rng, head: t.head, ours: block("victim", key), theirs: block("foreign", key), plain: block("plain", key),
			other: block("victim", t.keys[order[batch]]),
		}
		f.at = bytes.LastIndex(f.ours, t.head)
		require.Positive(t, f.at, "the stored block names its key")
		whole[key] = value
		t.m.Set("victim", key, t.m.Whole(append(bytes.Clone(value[:t.m.Head]), kind.make(f)...)))
		want[kind.reason]++
		t.kinds[kind.name]++
	}
	return func() {
		for key, value := range whole {
			t.m.Set("victim", key, value)
		}
	}
}

// Refreshed has a producer save blocks to a store that has them by a key that is lost, or of an earlier version. A producer never
// loads them; its consumer does, and finds them good after that.
func (r *Rig) Refreshed(m *Medium) {
	r.Helper()
	prompts := Texts(r.T, *Seed+4400, 4, 300, 500)
	single := r.ServeModel("sim", "single", "")
	want := r.All(single.URL, prompts, 4)
	r.Stop(single)
	saved := func(settings string) {
		p := r.ServeModel("sim", "prefill", m.Config("kv_producer", "store", settings))
		for _, prompt := range prompts {
			_, err := r.Client.Complete(r.Context(), p.URL, cluster.Request{Prompt: prompt, MaxTokens: 1})
			require.NoError(r, err)
		}
		r.Idle(p)
		r.Stop(p)
	}
	ring, _ := r.Ring()
	saved(fmt.Sprintf(`{"ticket_key_file":%q}`, ring))
	for name, before := range map[string]func() string{
		"foreign_key": func() string {
			ring, _ = r.Ring()
			return ring
		},
		"edition": func() string {
			for _, key := range m.Keys("store") {
				value := m.Get("store", key)
				m.Set("store", key, m.Whole(value[:len(value)-digestHeader]))
			}
			return ring
		},
	} {
		settings := fmt.Sprintf(`{"ticket_key_file":%q}`, before())
		d := r.ServeModel("sim", "decode", m.Config("kv_consumer", "store", settings), "--enable-prefix-caching=false")
		Same(r.T, name, want, r.All(d.URL, prompts, 2))
		require.Zero(r, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`), name)
		misses := r.Metrics(d).Sum("kvport_digest_misses_total", fmt.Sprintf("reason=%q", name))
		require.Positive(r, misses, name)
		saved(settings)
		answers := r.All(d.URL, prompts, 2)
		Same(r.T, name, want, answers)
		r.External(d, answers)
		require.Equal(r, misses, r.Metrics(d).Sum("kvport_digest_misses_total"), "%s: every block was replaced", name)
		r.Stop(d)
	}
}
