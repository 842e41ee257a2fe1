package protocol

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// script is the plugin's side of a transcript as a connection: it takes what the host sends, compares it with the
// host's side, and answers.
type script struct {
	t      *testing.T
	frozen *protoregistry.Files // protocol 1.0: fields that it lacks are not compared
	mu     sync.Mutex
	lines  []Line // the rest
}

// take checks that the host now says something, and gives the answers up to the next thing that it says.
func (s *script) take(at string, m proto.Message) (where string, answers []Line) {
	for len(s.lines) > 0 && s.lines[0].Host == "" {
		s.lines = s.lines[1:]
	}
	if len(s.lines) == 0 {
		s.t.Errorf("the host goes on where the transcript ends: %v", m)
		return at, nil
	}
	l := s.lines[0]
	data, err := s.encoded(m)
	if at != "" && at != l.Host || err != nil || !bytes.Equal(data, l.Bytes) {
		s.t.Errorf("on %s the host says %s (%v), want on %s %s", at, protojson.Format(m), err, l.Host, l.Message)
	}
	for s.lines = s.lines[1:]; len(s.lines) > 0 && s.lines[0].Host == ""; s.lines = s.lines[1:] {
		if s.lines[0].Plugin != "" {
			answers = append(answers, s.lines[0])
		}
	}
	return l.Host, answers
}

// encoded is a message of the host as bytes, without what was added since protocol 1.0.
func (s *script) encoded(m proto.Message) ([]byte, error) {
	m, err := reduce(s.frozen, m)
	if err != nil {
		return nil, err
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// Invoke implements grpc.ClientConnInterface.
func (s *script) Invoke(_ context.Context, path string, request, answer any, _ ...grpc.CallOption) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range []string{"describe", "heartbeat"} {
		if methodOf(name).path != path {
			continue
		}
		_, answers := s.take(name, request.(proto.Message))
		if len(answers) != 1 {
			return errors.New("the transcript has not one answer")
		}
		return proto.Unmarshal(answers[0].Bytes, answer.(proto.Message))
	}
	return errors.New(path)
}

// NewStream implements grpc.ClientConnInterface.
func (s *script) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return &scripted{script: s, ctx: ctx, answers: make(chan []byte, 16)}, nil
}

// scripted is one stream of a script.
type scripted struct {
	script  *script
	ctx     context.Context
	name    string
	answers chan []byte
}

func (c *scripted) Header() (metadata.MD, error) { return nil, nil }
func (c *scripted) Trailer() metadata.MD         { return nil }
func (c *scripted) CloseSend() error             { return nil }
func (c *scripted) Context() context.Context     { return c.ctx }

// SendMsg masks what differs from run to run, which docs/protocol.md lists.
func (c *scripted) SendMsg(v any) error {
	const fullTimeout, regionFD, progressFD = 5_000_000, 3, 4
	m := proto.Clone(v.(*kvportv1.SessionRequest)).(*kvportv1.SessionRequest)
	if m.GetTimeoutUs() > 1 {
		m.TimeoutUs = fullTimeout
	}
	for _, r := range m.GetOpen().GetRegions() {
		r.Fd = regionFD
	}
	if p := m.GetOpen().GetProgress(); p != nil {
		p.Fd = progressFD
	}
	c.script.mu.Lock()
	defer c.script.mu.Unlock()
	name, answers := c.script.take(c.name, m)
	c.name = name
	for _, l := range answers {
		if l.Plugin != c.name {
			c.script.t.Errorf("an answer on %s after a call on %s", l.Plugin, c.name)
		}
		c.answers <- l.Bytes
	}
	return nil
}

func (c *scripted) RecvMsg(v any) error {
	select {
	case data := <-c.answers:
		return proto.Unmarshal(data, v.(proto.Message))
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
}

// goldenEnv is the engine of the transcripts.
func goldenEnv() connector.Env {
	return connector.Env{
		Engine: "engine-1", Epoch: 7, Role: connector.RoleBoth, World: 1,
		Model: connector.Fingerprint(bytes.Repeat([]byte{0x11}, 32)), Shape: connector.Fingerprint(bytes.Repeat([]byte{0x22}, 32)),
		LinkKey: bytes.Repeat([]byte{0x33}, 32),
		Layout: connector.Layout{
			Name: "planes", Blocks: 8, Groups: []connector.Group{{BlockTokens: 4, Policy: connector.PolicyAll}},
			Segments: []connector.Segment{
				{BlockStride: segment0, Bytes: segment0},
				{Layer: -1, Offset: offset1, BlockStride: stride1, Bytes: segment1},
			},
		},
	}
}

func keyOf(n byte) connector.BlockKey { return connector.BlockKey(bytes.Repeat([]byte{n}, 32)) }

func queryOf(request connector.RequestID, computed int, keys ...byte) connector.Query {
	q := connector.Query{Request: request, Computed: computed, Tokens: 4*len(keys) + 1}
	for _, k := range keys {
		q.Keys = append(q.Keys, keyOf(k))
	}
	return q
}

func transferOf(tokens int, keys []byte, ids ...connector.BlockID) *connector.Transfer {
	t := &connector.Transfer{Request: "r1", Tokens: tokens}
	for i, id := range ids {
		t.Blocks = append(t.Blocks, connector.Block{Key: keyOf(keys[i]), ID: id})
	}
	return t
}

// hosted is a host's end in a play of a transcript.
type hosted struct {
	*testing.T
	ctx       context.Context
	remote    *host.Remote
	scheduler connector.Scheduler
	worker    connector.Worker
}

func (h *hosted) open() {
	h.Helper()
	var err error
	h.scheduler, err = h.remote.OpenScheduler(h.ctx, goldenEnv(), json.RawMessage(`{"dir":"@DIR@"}`))
	require.NoError(h, err)
}

func (h *hosted) match(want []int, queries ...connector.Query) {
	h.Helper()
	matches, err := h.scheduler.Match(h.ctx, queries)
	require.NoError(h, err)
	require.Len(h, matches, len(want))
	for i, m := range matches {
		require.Equal(h, connector.Match{Tokens: want[i], Async: want[i] > 0}, m)
	}
}

// failed checks an error with the blocks that it names.
func (h *hosted) failed(err, kind error, blocks ...connector.BlockID) {
	h.Helper()
	require.ErrorIs(h, err, kind)
	var named *connector.BlockError
	if len(blocks) > 0 {
		require.ErrorAs(h, err, &named)
		require.Equal(h, blocks, named.Blocks)
	}
}

// TestHost: today's host sends exactly what store.jsonl says, and understands what plugins answer there.
func TestHost(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	region, err := host.NewRegion(cacheBytes)
	require.NoError(t, err)
	defer region.Close()
	said := &script{t: t, frozen: frozen(t), lines: transcript(t, "store")}
	h := &hosted{T: t, ctx: ctx, remote: host.Connect(said, []*host.Region{region})}

	require.NoError(t, h.remote.Heartbeat(ctx))
	info, err := h.remote.Describe(ctx, json.RawMessage(`{"dir":"@DIR@"}`))
	require.NoError(t, err)
	require.Equal(t, "StoreConnector", info.Name)
	_, err = h.remote.Describe(ctx, json.RawMessage(`{"dir":"@DIR@","dri":1}`))
	require.ErrorIs(t, err, connector.ErrIncompatible)
	h.open()
	h.worker, err = h.remote.OpenWorker(ctx, goldenEnv(), json.RawMessage(`{"dir":"@DIR@"}`))
	require.NoError(t, err)

	h.match([]int{0}, queryOf("r1", 0, 1, 2, 3))
	require.NoError(t, h.worker.Save(ctx, transferOf(8, []byte{1, 2}, 0, 1), nil))
	h.match([]int{8}, queryOf("r1", 0, 1, 2, 3))
	h.match([]int{8}, queryOf("", 0, 1, 2, 3))
	h.match([]int{4}, queryOf("r1", 4, 1, 2, 3))
	h.match([]int{8, 0}, queryOf("r2", 0, 1, 2), queryOf("r3", 0, 9, 1))
	require.NoError(t, h.worker.Load(ctx, transferOf(8, []byte{1, 2}, 4, 5), nil))
	h.failed(h.worker.Load(ctx, transferOf(8, []byte{1, 9}, 6, 7), nil), connector.ErrGone, 7)
	h.failed(h.worker.Load(ctx, transferOf(3, []byte{0}, 7), nil), connector.ErrGone, 7)
	require.NoError(t, h.worker.Save(ctx, transferOf(3, []byte{0}, 7), nil))
	h.failed(h.worker.Save(ctx, transferOf(4, []byte{3}, 8), nil), connector.ErrIncompatible)
	require.NoError(t, h.worker.Save(ctx, transferOf(0, nil), nil))
	_, err = h.scheduler.(connector.Resetter).Reset(ctx)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	h.match([]int{0}, queryOf("r1", 0, 3))
	require.NoError(t, h.worker.Close())
	require.NoError(t, h.scheduler.Close())

	h.open()
	h.match([]int{8}, queryOf("r1", 0, 1, 2))
	require.NoError(t, h.scheduler.Close())
	require.Zero(t, h.remote.Violations())
	require.Equal(t, "shutdown", said.lines[0].Host, "what is left is for go-plugin")
}

// TestNoCommonVersion: a plugin that speaks another version is refused with one line that names both, by what its manifest
// says and by what the plugin says when it starts.
func TestNoCommonVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kvport-later")
	require.NoError(t, os.WriteFile(path, []byte(`#!/bin/sh
[ "$1" != --manifest ] || { echo '{"name":"LaterConnector","protocol_versions":[2,3]}'; exit; }
echo '1|2|unix|/nowhere|grpc|'
exec sleep 600
`), 0o755))
	_, err := host.Find([]string{filepath.Dir(path)}, "LaterConnector")
	require.ErrorIs(t, err, host.ErrConfig)
	require.NotContains(t, err.Error(), "\n")
	require.Regexp(t, `protocol.*\b2\b.*\b1\b|\b1\b.*protocol.*\b2\b`, err.Error())
	_, err = host.Launch(t.Context(), path, host.LaunchOptions{})
	require.ErrorIs(t, err, host.ErrConfig)
	require.NotContains(t, err.Error(), "\n")
	require.Regexp(t, `version: 2, Client versions: \[1\]`, err.Error())
}
