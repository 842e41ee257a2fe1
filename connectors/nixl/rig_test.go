package nixl

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func TestMain(m *testing.M) {
	// Without ib: see package native/nixl on programs that end by C's exit, as the race detector's do.
	if err := os.Setenv("UCX_MODULES", "^ib"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv(noCMA) != "" {
		if err := forbidCMA(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// libDir is where make deps puts NIXL. Without it the test is skipped, and never under make native-test.
func libDir(t testing.TB) string {
	t.Helper()
	dir := filepath.Join("..", "..", ".deps", "nixl")
	if _, err := os.Stat(filepath.Join(dir, "lock.sha256")); err != nil && os.Getenv("KVPORT_NATIVE_TEST") == "" {
		t.Skip("NixlConnector IS NOT TESTED: NIXL is not in .deps/nixl; run make deps")
	}
	return dir
}

// eachMode runs a test with consumers that read and with consumers that have the producer write.
func eachMode(t *testing.T, test func(t *testing.T, mode string)) {
	for _, mode := range []string{modePull, modePush} {
		t.Run(mode, func(t *testing.T) { test(t, mode) })
	}
}

const testBlocks = 64

// testLayout has two groups, segments of several sizes and gaps between blocks.
func testLayout() (l connector.Layout, size int) {
	const stride = 1024
	l = connector.Layout{
		Name: "test", Blocks: testBlocks,
		Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}, {BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2}},
		Segments: []connector.Segment{
			{Layer: 0, Group: 0, Offset: 0, BlockStride: stride, Bytes: 600},
			{Layer: 1, Group: 1, Offset: 600, BlockStride: stride, Bytes: 300},
			{Layer: 2, Group: 0, Offset: testBlocks * stride, BlockStride: 256, Bytes: 256},
			{Layer: connector.DigestLayer, Group: 0, Offset: testBlocks * (stride + 256), BlockStride: 32, Bytes: 32},
		},
	}
	return l, testBlocks * (stride + 256 + 32)
}

// side is one engine with its node and both sides of one rank.
type side struct {
	*testing.T
	node *Node
	s    connector.Scheduler
	w    connector.Worker
	kv   *connector.KV
}

func testEnv(role connector.Role, epoch uint64) connector.Env {
	l, _ := testLayout()
	return connector.Env{
		Engine: role.String(), Epoch: epoch, Role: role, World: 1, Layout: l, Log: slog.New(slog.DiscardHandler),
		Model: connector.Fingerprint{1}, Shape: connector.Fingerprint{2},
		LinkKey: bytes.Repeat([]byte{3}, 32),
	}
}

// open opens an engine's sides; change may be nil.
func open(t *testing.T, role connector.Role, c Config, change func(*connector.Env)) *side {
	t.Helper()
	c.LibDir = libDir(t)
	env := testEnv(role, 1)
	if change != nil {
		change(&env)
	}
	n, err := Open(t.Context(), env, c)
	require.NoError(t, err)
	_, size := testLayout()
	memory, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED)
	require.NoError(t, err)
	x := &side{T: t, node: n}
	x.kv, err = connector.NewKV(env.Layout, [][]byte{memory})
	require.NoError(t, err)
	leave := func() error { return nil }
	x.s, err = n.Scheduler(t.Context(), env, leave)
	require.NoError(t, err)
	x.w, err = n.Worker(t.Context(), env, leave)
	require.NoError(t, err)
	if env.Engine != unregistered {
		x.register()
	}
	t.Cleanup(func() {
		require.NoError(t, x.w.Close())
		require.NoError(t, x.s.Close())
		require.NoError(t, n.Close())
		require.NoError(t, syscall.Munmap(memory))
	})
	return x
}

// unregistered is the name of an engine that open does not tell its cache.
const unregistered = "unregistered"

func (x *side) register() {
	require.NoError(x, x.w.(connector.Registerer).RegisterKV(x.Context(), x.kv))
}

// run is n blocks of both groups at random places, with the keys of prefix; the last is partial.
func run(rng *rand.Rand, prefix byte, n int) (out []connector.Block) {
	for group, count := range []int{n, min(n, 2)} {
		for i, id := range rng.Perm(testBlocks)[:count] {
			b := connector.Block{ID: connector.BlockID(id), Group: uint16(group)}
			if at := n - count + i; at < n-1 {
				b.Key = connector.BlockKey{prefix, byte(at), 7}
			}
			out = append(out, b)
		}
	}
	return out
}

func keys(prefix byte, n int) (out []connector.BlockKey) {
	for i := range n {
		out = append(out, connector.BlockKey{prefix, byte(i), 7})
	}
	return out
}

const tail = 5 // tokens of the partial last block

func tokens(blocks int) int { return 16*(blocks-1) + tail }

func (x *side) fill(rng *rand.Rand, blocks []connector.Block) {
	for _, b := range blocks {
		spans, err := x.kv.Spans(b)
		require.NoError(x, err)
		for _, s := range spans {
			for i := range s {
				s[i] = byte(rng.Uint32())
			}
		}
	}
}

func (x *side) bytes(blocks []connector.Block) (out [][]byte) {
	for _, b := range blocks {
		spans, err := x.kv.Spans(b)
		require.NoError(x, err)
		for _, s := range spans {
			out = append(out, append([]byte(nil), s...))
		}
	}
	return out
}

// finish ends a request of n blocks, of which nothing was saved, and returns them with the ticket.
func (x *side) finish(rng *rand.Rand, prefix byte, n int) ([]connector.Block, connector.Hold) {
	x.Helper()
	blocks := run(rng, prefix, n)
	x.fill(rng, blocks)
	return blocks, x.end(blocks, n)
}

// end ends a request of n blocks.
func (x *side) end(blocks []connector.Block, n int) connector.Hold {
	x.Helper()
	h, err := x.s.(connector.Holder).Finish(x.Context(), []connector.Ended{{Request: "r", Reason: connector.ReasonLength, Tokens: tokens(n), Remote: true, Blocks: blocks}})
	require.NoError(x, err)
	require.Len(x, h, 1)
	require.NotZero(x, h[0].ID)
	return h[0]
}

// load loads a ticket's blocks elsewhere.
func (x *side) load(rng *rand.Rand, prefix byte, n int, ticket []byte) ([]connector.Block, error) {
	blocks := run(rng, prefix, n)
	ctx, cancel := context.WithTimeout(x.Context(), time.Minute)
	defer cancel()
	return blocks, x.w.Load(ctx, &connector.Transfer{Request: "r", Tokens: tokens(n), Blocks: blocks, Ticket: ticket}, x.kv)
}

// consumed is what the producer reports next.
func (x *side) consumed() []connector.HoldID {
	ctx, cancel := context.WithTimeout(x.Context(), time.Minute)
	defer cancel()
	ids, err := x.s.(connector.Holder).Consumed(ctx)
	require.NoError(x, err)
	return ids
}

// fetched waits until the producer has reported a hold, which its consumer may tell it after the load.
func (x *side) fetched(id connector.HoldID) {
	for !slices.Contains(x.consumed(), id) {
	}
}
