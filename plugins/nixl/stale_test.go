package main

import (
	varints "encoding/binary"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var flagNixlHandles = flag.Int("nixlhandles", 0, "stale handles of NixlConnector, signed again, that a decode engine is given; default 20, in soak 1000")

// staleNixl is a prefill and a decode engine, and somebody who has their key and makes handles that are wrong.
type staleNixl struct {
	*rig.Rig
	p, d  *cluster.Process
	rng   *rand.Rand
	keys  *keyring.File
	lease time.Duration
	more  []string // prompts to reuse blocks with
}

// handle is the plugin's part of a ticket, as far as it is changed here.
type handle map[string]json.RawMessage

// open takes a ticket apart.
func (s *staleNixl) open(data []byte) (*ticket.Envelope, handle) {
	s.Helper()
	e, err := ticket.Open(s.keys.Ring(), data)
	require.NoError(s, err)
	var h handle
	require.NoError(s, json.Unmarshal(e.Plugin, &h))
	return e, h
}

// seal signs a ticket again, as another one.
func (s *staleNixl) seal(e *ticket.Envelope, h handle) []byte {
	s.Helper()
	var err error
	e.Nonce = [16]byte{}
	e.Plugin, err = json.Marshal(h)
	require.NoError(s, err)
	out, err := ticket.Seal(s.keys.Ring(), e)
	require.NoError(s, err)
	return out
}

func (s *staleNixl) set(h handle, field string, v any) {
	s.Helper()
	data, err := json.Marshal(v)
	require.NoError(s, err)
	h[field] = data
}

func (s *staleNixl) number(h handle, field string) (n uint64) {
	s.Helper()
	if h[field] != nil {
		require.NoError(s, json.Unmarshal(h[field], &n))
	}
	return n
}

// ids are packed ids of as many blocks as a handle names; next gives each.
func (s *staleNixl) ids(h handle, next func(i int) int64) []byte {
	s.Helper()
	var have []byte
	require.NoError(s, json.Unmarshal(h["ids"], &have), "sim has one group, and its tickets name their blocks")
	n, _ := varints.Uvarint(have)
	out, last := varints.AppendUvarint(nil, n), int64(0)
	for i := range int(n) {
		id := next(i)
		out, last = varints.AppendVarint(out, id-last), id
	}
	return out
}

// compute has the prefill engine compute other prompts in the blocks that are free.
func (s *staleNixl) compute() {
	s.Helper()
	for range 3 {
		s.Post(s.p, s.more[s.rng.IntN(len(s.more))], 1, nil)
	}
}

// use gives the decode engine a ticket, and says what it answers and how many tokens it took from the prefill engine.
func (s *staleNixl) use(prompt string, data []byte) (tokens []int32, external float64) {
	s.Helper()
	quoted, err := json.Marshal(data)
	require.NoError(s, err)
	count := func() float64 { return s.Metrics(s.d).Sum("kvport_prompt_tokens_total", `source="external"`) }
	before := count()
	a := s.Post(s.d, prompt, s.Tokens, map[string]json.RawMessage{"do_remote_prefill": []byte("true"), "do_remote_decode": []byte("false"), "kvport_ticket": quoted})
	require.Len(s, a.Choices, 1)
	return a.Choices[0].Tokens, count() - before
}

// staleKinds are what can be wrong. Where right is true the decode engine may find out and get the right blocks.
func staleKinds() []struct {
	name  string
	right bool
} {
	return []struct {
		name  string
		right bool
	}{
		{"unknown id", false},
		{"out of range", true},
		{"other blocks", true},
		{"another's place on the board", true},
		{"consumed", false},
		{"reused", false},
		{"expired", false},
		{"forged", false},
		{"replayed", false},
		{"another prompt", false},
	}
}

// spoil makes a stale handle for a prompt out of a good ticket.
func (s *staleNixl) spoil(kind, prompt string, good []byte) []byte {
	s.Helper()
	e, h := s.open(good)
	switch kind {
	case "unknown id":
		s.set(h, "hold", s.number(h, "hold")+1+s.rng.Uint64N(1e6))
	case "out of range":
		s.set(h, "ids", s.ids(h, func(int) int64 { return 64 + s.rng.Int64N(1<<30) }))
	case "other blocks":
		first := s.rng.Int64N(48)
		s.set(h, "ids", s.ids(h, func(i int) int64 { return (first + int64(i)) % 64 }))
	case "another's place on the board":
		s.set(h, "slot", s.rng.IntN(1<<s.rng.IntN(20)))
	case "consumed":
		s.use(prompt, good)
	case "reused":
		s.use(prompt, good)
		s.compute()
	case "expired":
		<-time.After(s.lease + time.Duration(s.rng.Int64N(int64(s.lease))))
		s.compute()
	case "forged":
		var secret []byte
		require.NoError(s, json.Unmarshal(h["secret"], &secret))
		secret[s.rng.IntN(len(secret))] ^= byte(1 + s.rng.IntN(255))
		s.set(h, "secret", secret)
	case "replayed":
		s.use(prompt, good)
		return good
	case "another prompt":
		_, other := s.open(s.Ticket(s.p, s.more[s.rng.IntN(len(s.more))]))
		for _, field := range []string{"hold", "secret", "ids", "slot"} {
			h[field] = other[field]
		}
	}
	return s.seal(e, h)
}

// TestNixlStaleHandles: a decode engine gets tickets that are signed and wrong, so that only NixlConnector stands between
// them and a wrong token: each costs computing.
func TestNixlStaleHandles(t *testing.T) {
	rig.Need(t, "nixl")
	for _, mode := range nixlModes() {
		t.Run(mode, func(t *testing.T) { nixlStaleHandles(t, mode) })
	}
}

func nixlStaleHandles(t *testing.T, mode string) {
	n := rig.Count(t, "nixlhandles", *flagNixlHandles, 20, 1000)
	s := &staleNixl{Rig: rig.New(t), rng: rand.New(rand.NewPCG(*rig.Seed, 52234)), lease: 250 * time.Millisecond}
	s.Tokens = 4
	var err error
	s.keys, err = keyring.OpenAt("", nil)
	require.NoError(t, err)
	s.more = rig.Texts(t, *rig.Seed+600_000, 200, 60, 300)
	prompts := rig.Texts(t, *rig.Seed+500_000, n, 60, 300)
	node := s.ServeModel("sim", "single", "")
	want := s.All(node.URL, prompts, 4)
	s.Stop(node)
	s.p = s.ServeModel("sim", "prefill", nixlConfig("kv_producer", mode, s.lease, rig.Unhurried), "--num-blocks", "64", "--enable-prefix-caching=false")
	s.d = s.ServeModel("sim", "decode", nixlConfig("kv_consumer", mode, s.lease, rig.Unhurried), "--enable-prefix-caching=false")
	kinds, served, tried := staleKinds(), map[string]int{}, map[string]int{}
	for i, prompt := range prompts {
		kind := kinds[i%len(kinds)]
		got, external := s.use(prompt, s.spoil(kind.name, prompt, s.Ticket(s.p, prompt)))
		require.Equal(t, want[i].Tokens, got, "handle %d: %s", i, kind.name)
		tried[kind.name]++
		if external > 0 {
			served[kind.name]++
			require.True(t, kind.right, "handle %d, %s, is served: %.0f tokens", i, kind.name, external)
		}
	}
	require.Eventually(t, func() bool {
		got, external := s.use(prompts[0], s.Ticket(s.p, prompts[0]))
		require.Equal(t, want[0].Tokens, got)
		return external > 0
	}, time.Minute, time.Millisecond, "a good one after all that")
	s.Idle(s.p)
	s.Idle(s.d)
	m := s.Metrics(s.d)
	t.Logf("%d stale handles, %d tokens compared, 0 differ; tried: %v; right blocks came all the same: %v; %.0f loads failed, %.0f blocks with a wrong digest",
		n, n*s.Tokens, tried, served, m.Sum("kvport_failed_loads_total"), m.Sum("kvport_integrity_failures_total"))
}
