package acceptance

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var flagDamages = flag.Int("damages", 0, "damaged blocks to read; default 28, in soak 200")

// damages are ways in which a stored block can be wrong. Each changes data or gives it back at
// another length; other is the content of another block.
var damages = []struct {
	name string
	do   func(rng *rand.Rand, data, other []byte) []byte
}{
	{"bit flip", func(rng *rand.Rand, data, _ []byte) []byte {
		data[rng.IntN(len(data))] ^= 1 << rng.IntN(8)
		return data
	}},
	{"zeroed page", func(rng *rand.Rand, data, _ []byte) []byte {
		at := rng.IntN(len(data) - 4096)
		if bytes.Count(data[at:at+4096], []byte{0}) == 4096 {
			at = 0 // the header is never all zero
		}
		clear(data[at : at+4096])
		return data
	}},
	{"cut", func(rng *rand.Rand, data, _ []byte) []byte { return data[:rng.IntN(len(data))] }},
	{"empty", func(*rand.Rand, []byte, []byte) []byte { return nil }},
	{"grown", func(rng *rand.Rand, data, _ []byte) []byte { return append(data, byte(rng.Int())) }},
	{"another block's file", func(_ *rand.Rand, _, other []byte) []byte { return other }},
	{"another block's tail", func(_ *rand.Rand, data, other []byte) []byte {
		at := len(data) / 2
		copy(data[at:], other[at:])
		return data
	}},
}

// TestDamagedBlocks: whatever happens to a stored block, it is noticed when it is read, counted, and
// the tokens are right.
func TestDamagedBlocks(t *testing.T) {
	r := rig.New(t)
	all := rig.Count(t, "damages", *flagDamages, 14, 200)
	prompts, want := r.Unaligned(rig.Texts(t, *rig.Seed+4000, 8, 700, 900), 4)
	p := r.Serve("prefill", r.Config("kv_producer", "", ""))
	for _, prompt := range prompts { // one token: the answer's blocks are not stored
		_, err := r.Client.Complete(t.Context(), p.URL, cluster.Request{Prompt: prompt, MaxTokens: 1})
		require.NoError(t, err)
	}
	r.Idle(p)
	r.Stop(p)
	files := r.BlockFiles()
	require.NotEmpty(t, files)

	d := r.Serve("decode", r.Config("kv_consumer", "", ""), "--enable-prefix-caching=false")
	rng := rand.New(rand.NewPCG(*rig.Seed, 1))
	counted := func() float64 { return noticed(r, d) }
	require.Zero(t, counted())
	seen, tokens, kinds := 0.0, 0, map[string]int{}
	for n := 0; n < all; {
		batch := min(4, all-n)
		restore := make([]func(), 0, batch)
		order := rng.Perm(len(files))
		for _, i := range order[:batch] {
			restore = append(restore, damage(r, rng, files[i], files[order[batch]], kinds)) // the other file is whole
		}
		tokens += rig.Compare(t, fmt.Sprintf("damaged blocks %d-%d", n+1, n+batch), want, r.All(d.URL, prompts, 4))
		n += batch
		now := counted()
		require.Equal(t, seen+float64(batch), now, "every damaged block that was read is counted once")
		seen = now
		for _, f := range restore {
			f()
		}
	}
	t.Logf("%d damages of %d kinds, %v noticed, %d tokens compared, 0 differ: %v", all, len(kinds), seen, tokens, kinds)
	rig.Same(t, "restored", want, r.All(d.URL, prompts, 4))
	require.Equal(t, seen, counted(), "blocks that are whole again are not counted")
}

func damage(r *rig.Rig, rng *rand.Rand, path, otherPath string, kinds map[string]int) (restore func()) {
	r.Helper()
	whole, err := os.ReadFile(path)
	require.NoError(r, err)
	other, err := os.ReadFile(otherPath)
	require.NoError(r, err)
	kind := damages[rng.IntN(len(damages))]
	damaged := kind.do(rng, bytes.Clone(whole), other)
	require.NotEqual(r, whole, damaged, "%s changed nothing", kind.name)
	kinds[kind.name]++
	require.NoError(r, os.WriteFile(path, damaged, 0o600))
	return func() {
		require.NoError(r, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(r, os.WriteFile(path, whole, 0o600))
	}
}

// TestDirectoryDeleted: the store's directory goes away while engines run; service goes on, and new
// blocks are stored again.
func TestDirectoryDeleted(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+5000, rig.Count(t, "prompts", *rig.Prompts, 3, 6), 600, 900)
	want := rig.Single.Answers(r, prompts)
	node := r.Serve("both", r.Config("kv_both", "", ""), "--enable-prefix-caching=false")
	rig.Same(t, "before", want, r.All(node.URL, prompts, 2))
	r.Idle(node)
	require.NotEmpty(t, r.BlockFiles())
	require.NoError(t, os.RemoveAll(r.Store))
	rig.Same(t, "directory deleted", want, r.All(node.URL, prompts, 2))
	rig.Same(t, "after", want, r.All(node.URL, prompts, 2))
	r.Idle(node)
	require.NotEmpty(t, r.BlockFiles(), "blocks are stored again")
}

// TestReadOnlyStore: an engine that may not write loads what is there and leaves the rest.
func TestReadOnlyStore(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+6000, rig.Count(t, "prompts", *rig.Prompts, 4, 6), 600, 900)
	want := rig.Single.Answers(r, prompts)
	p := r.Serve("prefill", r.Config("kv_producer", "", ""))
	r.All(p.URL, prompts[:3], 1)
	r.Idle(p)
	r.Stop(p)
	files := r.BlockFiles()
	node := r.Serve("reader", r.Config("kv_both", `,"read_only":true`, ""), "--enable-prefix-caching=false")
	rig.Same(t, "read-only store", want, r.All(node.URL, prompts, 2))
	require.Positive(t, r.Metrics(node).Sum("kvport_prompt_tokens_total", `source="external"`))
	r.Idle(node)
	require.ElementsMatch(t, files, r.BlockFiles(), "a read-only store must not change")
}

// TestTwoModelsOneDirectory: engines whose weights differ never read each other's blocks.
func TestTwoModelsOneDirectory(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+7000, 3, 600, 900)
	other := changedModel(t)
	want := rig.Single.Answers(r, prompts)
	node := r.ServeModel(other, "other single", "")
	wantOther := r.All(node.URL, prompts, 1)
	r.Stop(node)
	differs := false
	for i := range want {
		differs = differs || !want[i].Equal(wantOther[i])
	}
	require.True(t, differs, "the changed weights should change tokens")

	a := r.Serve("a", r.Config("kv_both", "", ""), "--enable-prefix-caching=false")
	rig.Same(t, "weights A, cold", want, r.All(a.URL, prompts, 1))
	r.Stop(a)
	b := r.ServeModel(other, "b", r.Config("kv_both", "", ""), "--enable-prefix-caching=false")
	rig.Same(t, "weights B, cold, on A's directory", wantOther, r.All(b.URL, prompts, 1))
	require.Zero(t, r.Metrics(b).Sum("kvport_prompt_tokens_total", `source="external"`), "B loaded A's blocks")
	rig.Same(t, "weights B, warm", wantOther, r.All(b.URL, prompts, 1))
	require.Positive(t, r.Metrics(b).Sum("kvport_prompt_tokens_total", `source="external"`))
	r.Stop(b)
	a = r.Serve("a again", r.Config("kv_both", "", ""), "--enable-prefix-caching=false")
	rig.Same(t, "weights A, warm", want, r.All(a.URL, prompts, 1))
	require.Positive(t, r.Metrics(a).Sum("kvport_prompt_tokens_total", `source="external"`))
}

// changedModel is a copy of the model file in which some weights differ.
func changedModel(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(rig.Model(t))
	require.NoError(t, err)
	// The last bytes of a GGUF file are tensor data. Flipping the low bits of quantised values
	// changes weights a little and never makes them infinite.
	for at := len(data) / 2; at < len(data); at += 101 {
		data[at] ^= 1
	}
	path := filepath.Join(t.TempDir(), "changed.gguf")
	require.NoError(t, os.WriteFile(path, data, 0o600))
	return path
}
