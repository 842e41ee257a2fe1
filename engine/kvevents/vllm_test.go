package kvevents

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// peer is a process with vLLM's own classes at the other end.
type peer struct {
	t   *testing.T
	in  *bufio.Writer
	out *bufio.Scanner
}

// told is a message as vLLM's classes read it.
type told struct {
	Topic  string           `json:"topic"`
	Seq    int              `json:"seq"`
	Rank   int              `json:"rank"`
	Events []map[string]any `json:"events"`
}

func startPeer(t *testing.T, ours, theirs Place) *peer {
	python, err := filepath.Abs("../../.deps/vllm/venv/bin/python")
	require.NoError(t, err)
	if _, err := os.Stat(python); err != nil {
		t.Skipf("vLLM is not installed (make vllm-test): %v", err)
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/peer.py", ours.Endpoint, ours.ReplayEndpoint, theirs.Endpoint, theirs.ReplayEndpoint)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &peer{t, bufio.NewWriter(in), bufio.NewScanner(out)}
	p.out.Buffer(nil, 1<<20)
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	require.Equal(t, "ready", p.line())
	return p
}

func (p *peer) line() string {
	require.True(p.t, p.out.Scan(), "the peer has ended: %v", p.out.Err())
	return p.out.Text()
}

func (p *peer) do(command string, number int) (list []told) {
	_, err := fmt.Fprintf(p.in, "%s %d\n", command, number)
	require.NoError(p.t, err)
	require.NoError(p.t, p.in.Flush())
	for {
		line := p.line()
		if json.Unmarshal([]byte(line), &list) == nil {
			return list
		}
	}
}

// vLLM's subscriber reads what kvport publishes and replays, and kvport follows vLLM's publisher, through a gap, too.
func TestAgainstVLLM(t *testing.T) {
	dir := t.TempDir()
	ours := publisher(t, fmt.Sprintf(`, "endpoint": "ipc://%s/o", "replay_endpoint": "ipc://%s/r", "topic": "kv@us"`, dir, dir))
	theirs := Place{Endpoint: fmt.Sprintf("ipc://%s/t", dir), ReplayEndpoint: fmt.Sprintf("ipc://%s/u", dir)}
	p := startPeer(t, ours.Place(), theirs)
	subscribed(t, ours, 1)

	ev := with(func(ev *Event) { ev.Parent, ev.Group, ev.Extra = hashOf(3), 1, [][]string{nil, {Text("salt")}} })
	ours.Publish([]Event{ev, {Kind: Removed, Hashes: []Hash{hashOf(1)}, Medium: CPU, Group: 0}})
	ours.Publish([]Event{{Kind: Cleared}})
	got := p.do("read", 2)
	require.Equal(t, "kv@us", got[0].Topic)
	require.Equal(t, []int{0, 1}, []int{got[0].Seq, got[1].Seq})
	require.Equal(t, map[string]any{
		"type": "BlockStored", "block_hashes": []any{hashOf(0).String(), hashOf(1).String()}, "parent_block_hash": hashOf(3).String(),
		"token_ids": []any{1.0, 2.0, 300.0, 70000.0, 5.0, 6.0, 7.0, 8.0}, "block_size": 4.0, "lora_id": nil, "medium": "GPU", "lora_name": nil,
		"extra_keys": []any{nil, []any{"salt"}}, "group_idx": 1.0, "kv_cache_spec_kind": nil, "kv_cache_spec_sliding_window": nil,
		"locality": nil, "ownership": nil, "session_id": nil,
	}, got[0].Events[0])
	require.Equal(t, map[string]any{
		"type": "BlockRemoved", "block_hashes": []any{hashOf(1).String()}, "medium": "CPU", "group_idx": 0.0, "locality": nil, "ownership": nil,
	}, got[0].Events[1])
	require.Equal(t, []map[string]any{{"type": "AllBlocksCleared"}}, got[1].Events)
	require.Equal(t, got[1:], p.do("replay", 1))
	require.Equal(t, got, p.do("replay", 0))

	p.do("publish", 3)
	r := follow(t, theirs)
	r.has(t, "0 1 2")
	require.Equal(t, []uint64{0}, r.from)
	p.do("publish", 2)
	r.has(t, "0 1 2 3 4")
	require.Zero(t, r.counts(CountedLost)+r.counts(CountedInvalid))
}
