// Command plugin is a connector for the engine's own tests. A producer keeps finished blocks in its
// cache, and consumers fetch them from there over a unix socket; the ticket says where. On request one
// rank's worker fails.
package main

import (
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Dir      string `json:"dir" jsonschema:"description=where sockets are"`
	FailRank int    `json:"fail_rank" jsonschema:"description=the rank whose loads fail; 0: none; else the rank and 1 more"`
	Damage   bool   `json:"damage" jsonschema:"description=change one byte of the last block of each load"`
	Gate     string `json:"gate" jsonschema:"description=a file without which no second layer arrives; empty: none is needed"`
	Fault    string `json:"fault" jsonschema:"description=what goes wrong with the second layer of a load: damage; die: if the gate is there, which goes with it; or silent: no layer is announced"`
	Fetches  bool   `json:"fetches" jsonschema:"description=say that a Match fetches"`
}

// ticket is where a hold can be fetched.
type ticket struct {
	Socket string
	Hold   connector.HoldID
	Tokens int
}

// request asks for one block of a hold, or says that a rank has all it wants. Place counts blocks from
// the prompt's first.
type request struct {
	Hold  connector.HoldID
	Rank  int
	Group uint16
	Place int
	Done  bool
}

// peer is a producer's end: its ranks' caches and what is held in them.
type peer struct {
	mu       sync.Mutex
	caches   map[int]*connector.KV
	holds    map[connector.HoldID]*hold
	last     connector.HoldID
	consumed chan connector.HoldID
	socket   string
}

type hold struct {
	ended connector.Ended
	ranks int // that have not fetched yet
}

// peers are those of this process; a plugin process serves one engine.
type peers struct {
	mu  sync.Mutex
	one *peer
}

func (p *peers) get() *peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.one == nil {
		p.one = &peer{caches: map[int]*connector.KV{}, holds: map[connector.HoldID]*hold{}, consumed: make(chan connector.HoldID, 1024)}
	}
	return p.one
}

func main() {
	all := &peers{}
	sdk.Serve(connector.Plugin{
		Name: "HoldConnector", Version: "1", Capabilities: connector.CanHold | connector.CanOverlap, Schema: sdk.SchemaOf[config](),
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			c, err := sdk.DecodeConfig[config](raw)
			return connector.Info{
				Name: "HoldConnector", Capabilities: connector.CanHold | connector.CanOverlap, Groups: true, Scope: connector.ScopeNode, MatchFetches: c.Fetches,
			}, err
		},
		Scheduler: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			c, err := sdk.DecodeConfig[config](raw)
			if err != nil {
				return nil, err
			}
			s := &scheduler{env: env, peer: all.get()}
			s.peer.socket = filepath.Join(c.Dir, fmt.Sprintf("%s.%d", env.Engine, env.Epoch))
			_ = os.Remove(s.peer.socket) // of a process that died
			s.listener, err = net.Listen("unix", s.peer.socket)
			if err != nil {
				return nil, err
			}
			go s.peer.accept(s.listener, env.Layout.Groups[0].BlockTokens)
			return s, nil
		},
		Worker: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			c, err := sdk.DecodeConfig[config](raw)
			return &worker{config: c, env: env, peer: all.get()}, err
		},
	})
}

func (p *peer) accept(l net.Listener, blockTokens int) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go p.serve(conn, blockTokens)
	}
}

// serve answers a consumer's requests with the blocks' spans, straight from the cache.
func (p *peer) serve(conn net.Conn, blockTokens int) {
	defer conn.Close()
	in, out := gob.NewDecoder(conn), gob.NewEncoder(conn)
	for {
		var r request
		if in.Decode(&r) != nil || out.Encode(p.answer(r, blockTokens)) != nil {
			return
		}
	}
}

// answer is a block's spans, nil if it is not held any more.
func (p *peer) answer(r request, blockTokens int) [][]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, kv := p.holds[r.Hold], p.caches[r.Rank]
	if h == nil || kv == nil {
		return nil
	}
	if r.Done {
		if h.ranks--; h.ranks == 0 {
			delete(p.holds, r.Hold)
			p.consumed <- r.Hold
		}
		return nil
	}
	b, ok := place(h.ended.Blocks, r.Group, h.ended.Tokens, blockTokens)[r.Place]
	if !ok {
		return nil
	}
	spans, _ := kv.Spans(b)
	return spans
}

// place finds a group's blocks by their place in the prompt: they end with its last token.
func place(blocks []connector.Block, group uint16, end, blockTokens int) map[int]connector.Block {
	var own []connector.Block
	for _, b := range blocks {
		if b.Group == group {
			own = append(own, b)
		}
	}
	found := map[int]connector.Block{}
	first := (end+blockTokens-1)/blockTokens - len(own)
	for i, b := range own {
		found[first+i] = b
	}
	return found
}

type scheduler struct {
	env      connector.Env
	peer     *peer
	listener net.Listener
}

func (s *scheduler) Match(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
	out := make([]connector.Match, len(qs))
	for i, q := range qs {
		var t ticket
		if q.Ticket != nil && json.Unmarshal(q.Ticket, &t) == nil && t.Tokens > q.Computed {
			out[i] = connector.Match{Tokens: min(t.Tokens, q.Tokens) - q.Computed, Async: true}
		}
	}
	return out, nil
}

func (s *scheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	p := s.peer
	p.mu.Lock()
	defer p.mu.Unlock()
	holds := make([]connector.Hold, len(ended))
	for i, e := range ended {
		if !e.Remote || len(e.Blocks) == 0 {
			continue
		}
		p.last++
		p.holds[p.last] = &hold{ended: e, ranks: s.env.World}
		data, err := json.Marshal(ticket{Socket: p.socket, Hold: p.last, Tokens: e.Tokens})
		if err != nil {
			return nil, err
		}
		holds[i] = connector.Hold{ID: p.last, Consumers: 1, Ticket: data}
	}
	return holds, nil
}

func (s *scheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	select {
	case id := <-s.peer.consumed:
		return []connector.HoldID{id}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *scheduler) Close() error { return s.listener.Close() }

type worker struct {
	config
	env  connector.Env
	peer *peer
}

// Save stores nothing: the blocks stay where they are. It only learns where that is.
func (w *worker) Save(_ context.Context, _ *connector.Transfer, kv *connector.KV) error {
	w.peer.mu.Lock()
	defer w.peer.mu.Unlock()
	w.peer.caches[w.env.Rank] = kv
	return nil
}

func (w *worker) Load(_ context.Context, t *connector.Transfer, kv *connector.KV) error {
	return w.fetch(t, func(have map[connector.Block][][]byte) error {
		for b, data := range have {
			spans, err := kv.Spans(b)
			if err != nil {
				return err
			}
			for i, s := range spans {
				copy(s, data[i])
			}
			if w.Damage && b.ID == t.Blocks[len(t.Blocks)-1].ID {
				spans[0][0] ^= 1
			}
		}
		return nil
	})
}

// LoadLayers announces each layer when all blocks have it.
func (w *worker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	if w.Fault == "silent" {
		return w.Load(ctx, t, kv)
	}
	last := t.Blocks[len(t.Blocks)-1]
	return w.fetch(t, func(have map[connector.Block][][]byte) error {
		bring := func(layer int) {
			for b, data := range have {
				for i, s := range kv.Segments(b.Group) {
					if kv.Layout().Segments[s].Layer == layer {
						copy(kv.View(s, b.ID), data[i])
						if w.Damage && i == 0 && b == last || w.Fault == "damage" && layer == 1 && b == last {
							kv.View(s, b.ID)[0] ^= 1
						}
					}
				}
			}
		}
		bring(connector.DigestLayer)
		for n := range kv.Layout().Layers() {
			if n == 1 {
				w.wait()
			}
			bring(n)
			if len(have) == len(t.Blocks) {
				arrived.Advance(n + 1)
			}
		}
		return nil
	})
}

// wait waits for the gate, or dies there.
func (w *worker) wait() {
	if w.Fault == "die" {
		if os.Remove(w.Gate) == nil {
			os.Exit(3)
		}
		return
	}
	for w.Gate != "" {
		if _, err := os.Stat(w.Gate); err == nil {
			return
		}
		<-time.After(time.Millisecond)
	}
}

// fetch gets the content of a transfer's blocks, and has a function write it.
func (w *worker) fetch(t *connector.Transfer, write func(map[connector.Block][][]byte) error) error {
	if w.FailRank == w.env.Rank+1 {
		return &connector.BlockError{Blocks: []connector.BlockID{t.Blocks[len(t.Blocks)-1].ID}, Err: errors.New("this rank fails")}
	}
	var from ticket
	if err := json.Unmarshal(t.Ticket, &from); err != nil {
		return err
	}
	conn, err := net.Dial("unix", from.Socket)
	if err != nil {
		return fmt.Errorf("%w: %w", connector.ErrGone, err)
	}
	defer conn.Close()
	failed := &connector.BlockError{Err: connector.ErrGone}
	in, out := gob.NewDecoder(conn), gob.NewEncoder(conn)
	have := map[connector.Block][][]byte{}
	for g := range w.env.Layout.Groups {
		for at, b := range place(t.Blocks, uint16(g), t.From+t.Tokens, w.env.Layout.Groups[g].BlockTokens) {
			var data [][]byte
			err := errors.Join(out.Encode(request{Hold: from.Hold, Rank: w.env.Rank, Group: b.Group, Place: at}), in.Decode(&data))
			if err != nil || data == nil {
				failed.Blocks = append(failed.Blocks, b.ID)
				continue
			}
			have[b] = data
		}
	}
	if err := write(have); err != nil {
		return err
	}
	var none [][]byte
	_ = errors.Join(out.Encode(request{Hold: from.Hold, Rank: w.env.Rank, Done: true}), in.Decode(&none))
	if len(failed.Blocks) > 0 {
		return failed
	}
	return nil
}

func (w *worker) Close() error { return nil }
