package mutants

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// arenaSize is how large an arena the connectors here ask for.
const arenaSize = 1 << 20

// arenaLog keeps blocks in an arena as records back to back: magic, length, SHA-256 of what follows,
// key, data. The magic is written last, and the sum says whether the rest is what was written: a
// record that was begun is none, and one that was damaged is passed over or ends the log.
type arenaLog struct {
	mem   []byte
	end   int           // of the records
	begun bool          // a mutant: the magic is written first
	pause time.Duration // of a mutant, in the middle of a record
}

const (
	recordMagic  = 0x6b76706f72743031
	recordHeader = 8 + 8 + sha256.Size
	keyBytes     = len(connector.StoreKey{})
)

// recordSum is what a record's sum is made of: the place too, so that an old record that lies
// elsewhere now is none.
func recordSum(at int, body []byte) [sha256.Size]byte {
	h := sha256.New()
	_ = binary.Write(h, binary.LittleEndian, uint64(at))
	h.Write(body)
	return [sha256.Size]byte(h.Sum(nil))
}

// add appends a block and says where its bytes lie now. When the arena is full it is not kept.
func (l *arenaLog) add(k connector.StoreKey, data []byte) (at int, kept bool) {
	size := recordHeader + keyBytes + len(data)
	if size > len(l.mem)-l.end {
		return 0, false
	}
	r := l.mem[l.end : l.end+size]
	binary.LittleEndian.PutUint64(r, 0)
	if l.begun {
		binary.LittleEndian.PutUint64(r, recordMagic)
	}
	binary.LittleEndian.PutUint64(r[8:], uint64(keyBytes+len(data)))
	body := r[recordHeader:]
	copy(body, k[:])
	copy(body[keyBytes:], data[:len(data)/2])
	if l.pause > 0 {
		time.Sleep(l.pause) //nolint:forbidigo // to be slow is its fault
	}
	copy(body[keyBytes+len(data)/2:], data[len(data)/2:])
	sum := recordSum(l.end, body)
	copy(r[16:], sum[:])
	binary.LittleEndian.PutUint64(r, recordMagic)
	l.end += size
	return l.end - len(data), true
}

// recover gives the blocks of all records, from the oldest to the newest, and whether each is sound.
// It puts end behind the last one.
func (l *arenaLog) recover(found func(k connector.StoreKey, data []byte, sound bool)) {
	l.end = 0
	for len(l.mem)-l.end > recordHeader+keyBytes {
		r := l.mem[l.end:]
		n := binary.LittleEndian.Uint64(r[8:])
		if binary.LittleEndian.Uint64(r) != recordMagic || n < uint64(keyBytes) || n > uint64(len(r)-recordHeader) {
			return
		}
		body := r[recordHeader : recordHeader+int(n)]
		sound := recordSum(l.end, body) == [sha256.Size]byte(r[16:recordHeader])
		l.end += recordHeader + int(n)
		found(connector.StoreKey(body), bytes.Clone(body[keyBytes:]), sound)
	}
}

// clear forgets everything.
func (l *arenaLog) clear() {
	clear(l.mem)
	l.end = 0
}

// arenaConfig is the config of a Store in an arena.
type arenaConfig struct{}

// ArenaBytes says what the Store asks the host for.
func (arenaConfig) ArenaBytes() int64 { return arenaSize }

// ArenaReference is a correct connector made of a Store that keeps its blocks in the arena.
func ArenaReference() connector.Plugin {
	return arenaPlugin(func(env connector.Env) *arenaStore { return openArena(&arenaLog{mem: env.Arena}, sound) })
}

func arenaPlugin(open func(connector.Env) *arenaStore) connector.Plugin {
	d := sdk.Definition{Name: "ArenaConnector", Version: "1", Scope: connector.ScopeEngine}
	return sdk.FromStore(d, func(_ context.Context, env connector.Env, _ arenaConfig) (connector.Store, error) {
		return open(env), nil
	})
}

// arenaStore is a Store whose blocks are found again in its log.
type arenaStore struct {
	*memory
	mu    sync.Mutex
	log   *arenaLog
	added func(k connector.StoreKey, at, size int) // a mutant's; may be nil
	bad   map[connector.StoreKey]bool              // a mutant's: damaged blocks
}

// sound takes what is as it was written; a newer record that is not takes an older one's place.
func sound(s *arenaStore, k connector.StoreKey, data []byte, sound bool) {
	if sound {
		s.blocks[k] = data
	} else {
		delete(s.blocks, k)
	}
}

func openArena(log *arenaLog, take func(s *arenaStore, k connector.StoreKey, data []byte, sound bool)) *arenaStore {
	s := &arenaStore{memory: &memory{blocks: map[connector.StoreKey][]byte{}}, log: log, bad: map[connector.StoreKey]bool{}}
	log.recover(func(k connector.StoreKey, data []byte, sound bool) { take(s, k, data, sound) })
	return s
}

// Get implements connector.Store.
func (s *arenaStore) Get(ctx context.Context, items []connector.Item) error {
	s.mu.Lock()
	bad := slices.ContainsFunc(items, func(it connector.Item) bool { return s.bad[it.Key] })
	s.mu.Unlock()
	if bad {
		return errors.New("the sum is wrong")
	}
	return s.memory.Get(ctx, items)
}

// Put implements connector.Store.
func (s *arenaStore) Put(ctx context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		known, err := s.Lookup(ctx, [][]connector.StoreKey{{it.Key}})
		if err == nil && known[0] == 1 && !it.Replace && s.same(it) {
			continue
		}
		if err := errors.Join(err, s.memory.Put(ctx, []connector.Item{it})); err != nil {
			return err
		}
		at, kept := s.log.add(it.Key, slices.Concat(it.Spans...))
		delete(s.bad, it.Key)
		if kept && s.added != nil {
			s.added(it.Key, at, it.Size())
		}
	}
	return nil
}

// arenaMutants are wrong in what they do with the arena.
func arenaMutants() []Mutant {
	return []Mutant{
		{Name: "opens without the arena that it asked for", Case: "arena-missing", Plugin: func() connector.Plugin {
			return newBackend().plugin(wrappers{check: (*connector.Env).Validate})
		}},
		{Name: "keeps its blocks outside the arena", Case: "arena-kept", Plugin: ArenaNone},
		{Name: "keeps addresses in the arena", Case: "arena-kept", Plugin: keepsAddresses},
		{Name: "keeps its blocks in its process", Case: "arena-killed", Program: "kvport-arena-none", Plugin: ArenaNone},
		{Name: "believes a record that was begun", Case: "arena-torn", Program: "kvport-arena-torn", Plugin: ArenaTorn},
		{Name: "says of a damaged block only that it failed", Case: "arena-damaged", Plugin: func() connector.Plugin {
			return arenaPlugin(func(env connector.Env) *arenaStore {
				return openArena(&arenaLog{mem: env.Arena}, func(s *arenaStore, k connector.StoreKey, data []byte, sound bool) {
					s.blocks[k], s.bad[k] = data, !sound
				})
			})
		}},
		{Name: "does not open a strange arena", Case: "arena-garbage", Plugin: func() connector.Plugin {
			return newBackend().plugin(wrappers{check: func(env *connector.Env) error {
				if err := errors.Join(env.Validate(), env.CheckArena(arenaSize)); err != nil {
					return err
				}
				if first := binary.LittleEndian.Uint64(env.Arena); first != 0 && first != recordMagic {
					return fmt.Errorf("the arena is another's: %w", connector.ErrCorrupt)
				}
				return nil
			}})
		}},
		{Name: "uses its index of one arena for the next", Case: "arena-fresh", Plugin: keepsIndex},
		{Name: "resets its index of the arena only", Case: "reset", Plugin: func() connector.Plugin {
			d := sdk.Definition{Name: "ArenaConnector", Version: "1", Scope: connector.ScopeEngine, Reset: true}
			return sdk.FromStore(d, func(_ context.Context, env connector.Env, _ arenaConfig) (connector.Store, error) {
				return indexReset{openArena(&arenaLog{mem: env.Arena}, sound)}, nil
			})
		}},
	}
}

// indexReset forgets where blocks lie, and leaves them there.
type indexReset struct{ *arenaStore }

// Reset implements connector.Resetter.
func (s indexReset) Reset(context.Context) (bool, error) {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	clear(s.blocks)
	return true, nil
}

// ArenaNone keeps nothing in the arena.
func ArenaNone() connector.Plugin {
	return arenaPlugin(func(connector.Env) *arenaStore { return openArena(&arenaLog{}, sound) })
}

// ArenaTorn takes a record for whole as soon as it was begun.
func ArenaTorn() connector.Plugin {
	return arenaPlugin(func(env connector.Env) *arenaStore {
		log := &arenaLog{mem: env.Arena, begun: true, pause: 2 * time.Millisecond}
		return openArena(log, func(s *arenaStore, k connector.StoreKey, data []byte, _ bool) { s.blocks[k] = data })
	})
}

// keepsAddresses keeps slices of the arena for the next plugin, which has it elsewhere.
func keepsAddresses() connector.Plugin {
	var mu sync.Mutex
	kept := map[connector.StoreKey][]byte{}
	return arenaPlugin(func(env connector.Env) *arenaStore {
		mu.Lock()
		defer mu.Unlock()
		s := openArena(&arenaLog{mem: env.Arena}, sound)
		maps.Copy(s.blocks, kept)
		s.added = func(k connector.StoreKey, at, size int) {
			mu.Lock()
			defer mu.Unlock()
			kept[k] = env.Arena[at : at+size]
		}
		return s
	})
}

// keepsIndex keeps the places of blocks in the arena and looks there in whatever arena it is given.
func keepsIndex() connector.Plugin {
	type place struct{ at, size int }
	var mu sync.Mutex
	index := map[connector.StoreKey]place{}
	return arenaPlugin(func(env connector.Env) *arenaStore {
		mu.Lock()
		defer mu.Unlock()
		s := openArena(&arenaLog{mem: env.Arena}, sound)
		for k, p := range index {
			s.blocks[k] = env.Arena[p.at : p.at+p.size]
		}
		s.added = func(k connector.StoreKey, at, size int) {
			mu.Lock()
			defer mu.Unlock()
			index[k] = place{at, size}
		}
		return s
	})
}
