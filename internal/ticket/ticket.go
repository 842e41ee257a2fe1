// Package ticket signs what a producer tells a consumer about the blocks it holds.
//
// A ticket travels through routers and clients, which must not be able to make or change one. It is
// an [Envelope] around the bytes of the producer's plugin, signed with a key that the engines of a
// deployment share. A [Guard] at the consumer refuses tickets of another model, of a former life of
// the producer, and those that were used too often. It does so without comparing clocks of two
// hosts: that a lease is over is for the producer to say.
package ticket

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

// Limits of a ticket in bytes.
const (
	MaxEngine = 1 << 10
	MaxPlugin = 64 << 10
	MaxShape  = 1 << 10
	MaxSize   = headSize + idSize + 4 + cutSize + MaxEngine + MaxPlugin + MaxShape + sha256.Size
)

// MaxRanks bounds the ranks of a producer.
const MaxRanks = 1 << 12

// MaxConsumers bounds how often one ticket may be used.
const MaxConsumers = 1 << 20

// Why a ticket is refused. A wrong fingerprint is connector.ErrIncompatible.
var (
	ErrForged   = errors.New("ticket is damaged or not signed with our key")
	ErrReplayed = errors.New("ticket was used more often than it allows")
	ErrStale    = errors.New("ticket is of an earlier life of its engine")
)

// ForeignKeyError says that a ticket names a key which is not in the ring, or no longer. Whoever wrote it may be
// anybody.
type ForeignKeyError struct{ ID string }

// Error implements error.
func (e *ForeignKeyError) Error() string {
	return "ticket is signed with the foreign key " + e.ID
}

// The first byte of a ticket, on which depends what follows it. One with a text of its shape has that
// text at the end, and its length behind the others. Behind that, one whose blocks can be cut has what is
// needed for it: versionRanks the number of ranks too, which digests are bound to. Nobody writes versionCut any more.
const (
	version       = 1
	versionShaped = 2
	versionCut    = 3
	versionRanks  = 4

	// named is added where the id of the key follows the first byte. A ring that may be shared with earlier versions,
	// which know nothing of ids, signs without.
	named = 0x80
)

// idSize is the length of the id of a key.
const idSize = 8

// cutSize is the length of a Cut.
const cutSize = 32 + 4 + 32 + 32 + 4

// headSize is the length of the fixed part: version, epoch, hold, tokens, consumers, lease, both
// fingerprints, nonce, lengths of engine and plugin bytes.
const headSize = 1 + 8 + 8 + 4 + 4 + 8 + 32 + 32 + 16 + 4 + 4

// Envelope is what a ticket says.
type Envelope struct {
	Engine       string // id of the producer
	Epoch        uint64 // of the producer; later lives have greater ones
	Hold         connector.HoldID
	Tokens       int // tokens whose KV the blocks hold
	Model, Shape connector.Fingerprint
	Lease        time.Duration // from issue; the producer frees the blocks after it, unless renewed; 0: nothing keeps them, they may be gone at any time
	Consumers    int           // how often it may be used; 0 means once
	Nonce        [16]byte      // tells tickets apart; zero: Seal draws one
	Plugin       []byte        // for the consumer's connector, uninterpreted
	ShapeText    string        // what the shape is made of, for messages; may be empty
	Cut          Cut           // zero: only engines of the same shape can use it
}

// Cut is what engines of another shape need: what is equal all the same, and of which prompt the tokens
// are, as the producer addresses its own blocks.
type Cut struct {
	Base        connector.Fingerprint // what the shape is made of, except block size and ranks; never zero
	BlockTokens int
	Ranks       int                // of the producer; 0: a ticket of an earlier release
	Last        connector.BlockKey // of the last full block; zero without one
	Tail        connector.BlockKey // of all tokens, if the last block is partial; zero: not known
}

// Seal signs e with the first key of a ring. A zero e.Nonce is replaced by a random one. Errors name the field
// that is out of range and wrap ErrIncompatible.
func Seal(ring *keyring.Ring, e *Envelope) ([]byte, error) {
	key := ring.First()
	if err := checkKey(key.Secret); err != nil {
		return nil, err
	}
	if err := e.check(); err != nil {
		return nil, err
	}
	if e.Nonce == ([16]byte{}) {
		if _, err := rand.Read(e.Nonce[:]); err != nil {
			return nil, fmt.Errorf("ticket nonce: %w", err)
		}
	}
	out := make([]byte, 0, headSize+idSize+4+cutSize+len(e.Engine)+len(e.Plugin)+len(e.ShapeText)+sha256.Size)
	v := e.version()
	if ring.Old {
		out = append(out, v)
	} else {
		id, err := hex.DecodeString(key.ID)
		if err != nil {
			return nil, fmt.Errorf("id of the ticket key: %w", err)
		}
		out = append(append(out, v|named), id...)
	}
	out = binary.BigEndian.AppendUint64(out, e.Epoch)
	out = binary.BigEndian.AppendUint64(out, uint64(e.Hold))
	out = binary.BigEndian.AppendUint32(out, uint32(e.Tokens))
	out = binary.BigEndian.AppendUint32(out, uint32(e.Consumers))
	out = binary.BigEndian.AppendUint64(out, uint64(e.Lease))
	out = append(append(append(out, e.Model[:]...), e.Shape[:]...), e.Nonce[:]...)
	out = binary.BigEndian.AppendUint32(out, uint32(len(e.Engine)))
	out = binary.BigEndian.AppendUint32(out, uint32(len(e.Plugin)))
	if v >= versionShaped {
		out = binary.BigEndian.AppendUint32(out, uint32(len(e.ShapeText)))
	}
	if c := &e.Cut; v >= versionRanks {
		out = binary.BigEndian.AppendUint32(append(out, c.Base[:]...), uint32(c.BlockTokens))
		out = append(append(out, c.Last[:]...), c.Tail[:]...)
		out = binary.BigEndian.AppendUint32(out, uint32(c.Ranks))
	}
	out = append(append(append(out, e.Engine...), e.Plugin...), e.ShapeText...)
	return append(out, sign(key.Secret, out)...), nil
}

func (e *Envelope) version() byte {
	switch {
	case e.Cut != Cut{}:
		return versionRanks
	case e.ShapeText != "":
		return versionShaped
	}
	return version
}

// Open verifies a ticket, which any key of the ring may have signed, and reads it. The result shares no memory with
// data. A ticket that names a key which the ring lacks is a ForeignKeyError. Whatever else is wrong with data is
// ErrForged: a stranger learns nothing from the difference.
func Open(ring *keyring.Ring, data []byte) (*Envelope, error) {
	if len(data) < headSize+sha256.Size || len(data) > MaxSize {
		return nil, ErrForged
	}
	body, mac := data[:len(data)-sha256.Size], data[len(data)-sha256.Size:]
	v, r := body[0]&^named, reader{body[1:]}
	if v < version || v > versionRanks {
		return nil, ErrForged
	}
	if body[0]&named != 0 {
		if err := r.keyID(ring); err != nil {
			return nil, err
		}
	}
	if !signed(ring, body, mac) {
		return nil, ErrForged
	}
	e := &Envelope{Epoch: r.u64(), Hold: connector.HoldID(r.u64())}
	tokens, consumers, lease := r.u32(), r.u32(), r.u64()
	copy(e.Model[:], r.next(len(e.Model)))
	copy(e.Shape[:], r.next(len(e.Shape)))
	copy(e.Nonce[:], r.next(len(e.Nonce)))
	engine, plugin, shape := r.u32(), r.u32(), uint32(0)
	if v >= versionShaped && len(r.rest) >= 4 {
		shape = r.u32()
	}
	e.Cut = r.cut(v)
	if uint64(engine)+uint64(plugin)+uint64(shape) != uint64(len(r.rest)) || tokens > math.MaxInt32 || lease > math.MaxInt64 {
		return nil, ErrForged
	}
	e.Tokens, e.Consumers, e.Lease = int(tokens), int(consumers), time.Duration(lease)
	e.Engine = string(r.next(int(engine)))
	if plugin > 0 {
		e.Plugin = append([]byte(nil), r.next(int(plugin))...)
	}
	e.ShapeText = string(r.rest)
	if e.check() != nil {
		return nil, ErrForged
	}
	return e, nil
}

// check says whether the fields are within their limits.
func (e *Envelope) check() error {
	var field string
	switch {
	case e.Engine == "" || len(e.Engine) > MaxEngine:
		field = "engine"
	case e.Tokens < 0 || e.Tokens > math.MaxInt32:
		field = "tokens"
	case e.Consumers < 0 || e.Consumers > MaxConsumers:
		field = "consumers"
	case e.Lease < 0:
		field = "lease"
	case len(e.Plugin) > MaxPlugin:
		field = "plugin"
	case len(e.ShapeText) > MaxShape:
		field = "shape text"
	case e.Cut != Cut{} && !e.Cut.valid():
		field = "cut"
	default:
		return nil
	}
	return fmt.Errorf("ticket: %s is out of range: %w", field, connector.ErrIncompatible)
}

func (c *Cut) valid() bool {
	return c.Base != (connector.Fingerprint{}) && c.BlockTokens > 0 && c.BlockTokens <= math.MaxInt32 && c.Ranks >= 0 && c.Ranks <= MaxRanks
}

func checkKey(key []byte) error {
	if len(key) < keyring.MinKey {
		return fmt.Errorf("ticket key has %d bytes, want at least %d: %w", len(key), keyring.MinKey, connector.ErrIncompatible)
	}
	return nil
}

// signed reports whether a key of the ring made a signature. It asks all of them, so that the time it takes says
// nothing of which one did.
func signed(ring *keyring.Ring, body, mac []byte) (is bool) {
	for i := range ring.Keys {
		if key := ring.Keys[i].Secret; len(key) >= keyring.MinKey && hmac.Equal(mac, sign(key, body)) {
			is = true
		}
	}
	return is
}

func sign(key, body []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte("kvport/ticket\x00"))
	mac.Write(body)
	return mac.Sum(nil)
}

// reader takes fixed-size fields off a slice whose length was checked.
type reader struct{ rest []byte }

func (r *reader) next(n int) []byte {
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

// keyID reads the id of the key, which the ring must have.
func (r *reader) keyID(ring *keyring.Ring) error {
	if len(r.rest) < headSize-1+idSize {
		return ErrForged
	}
	if id := hex.EncodeToString(r.next(idSize)); !ring.Has(id) {
		return &ForeignKeyError{id}
	}
	return nil
}

// cut reads the Cut of a ticket; what is too short for one does not have the length that it says.
func (r *reader) cut(version byte) (c Cut) {
	size := cutSize
	if version == versionCut {
		size -= 4
	}
	if version < versionCut || len(r.rest) < size {
		return c
	}
	copy(c.Base[:], r.next(len(c.Base)))
	c.BlockTokens = int(r.u32())
	copy(c.Last[:], r.next(len(c.Last)))
	copy(c.Tail[:], r.next(len(c.Tail)))
	if version >= versionRanks {
		c.Ranks = int(r.u32())
	}
	return c
}

func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.next(4)) }
func (r *reader) u64() uint64 { return binary.BigEndian.Uint64(r.next(8)) }

// What a Guard remembers at most.
const (
	maxUses    = 1 << 16
	maxEngines = 1 << 12
	// minMemory is how long a ticket with a short lease is remembered: producers renew leases.
	minMemory = 10 * time.Minute
)

// Guard refuses tickets that are genuine but not, or no longer, for us. It remembers a bounded
// number of tickets: one is forgotten a while after its lease, when its producer has released the
// blocks anyway, or when too many newer ones came. It is safe for concurrent use.
type Guard struct {
	model, shape connector.Fingerprint
	base         connector.Fingerprint // zero: only tickets of the same shape

	mu      sync.Mutex
	byNonce map[[16]byte]*seen
	order   []*seen // by first sight
	uses    int
	epochs  map[string]uint64 // of each engine, the newest seen
}

// seen is one ticket that was used.
type seen struct {
	nonce [16]byte
	by    map[connector.RequestID]struct{}
	first time.Time
	keep  time.Duration
}

// NewGuard makes the guard of an engine with the given fingerprints.
func NewGuard(model, shape connector.Fingerprint) *Guard {
	return &Guard{model: model, shape: shape, byNonce: map[[16]byte]*seen{}, epochs: map[string]uint64{}}
}

// Reshape makes the guard accept tickets of other shapes with that base, too (rule RESHAPE-01). It must be called
// before the first Check.
func (g *Guard) Reshape(base connector.Fingerprint) { g.base = base }

// fits reports why the blocks of a ticket are of no use here.
func (g *Guard) fits(e *Envelope) error {
	if e.Model != g.model {
		return fmt.Errorf("ticket of engine %q: model %v, ours is %v: %w", e.Engine, e.Model, g.model, connector.ErrIncompatible)
	}
	none := connector.Fingerprint{}
	var why string
	switch {
	case e.Shape == g.shape:
		return nil
	case g.base != none && e.Cut.Base == g.base && e.Lease > 0 && e.Cut.Ranks > 0:
		return nil
	case g.base != none && e.Cut.Base == g.base && e.Lease > 0:
		why = "it does not say how many ranks made its digests, as those of earlier releases"
	case g.base == none && e.Cut.Base == none:
		why = "neither it nor we can cut blocks"
	case g.base == none:
		why = "we cannot cut blocks"
	case e.Cut.Base == none:
		why = "it cannot cut blocks"
	default:
		why = "more than block size and ranks differs"
	}
	return fmt.Errorf("ticket of engine %q: shape %v, ours is %v, and %s: %w", e.Engine, e.Shape, g.shape, why, connector.ErrIncompatible)
}

// Check counts one use of a ticket by a request of ours. The same request may check it again at no
// cost, since it is matched many times; requests need unique ids. A refusal wraps ErrIncompatible, ErrStale or
// ErrReplayed and uses nothing up.
func (g *Guard) Check(e *Envelope, request connector.RequestID) error {
	if err := g.fits(e); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now() // only ever subtracted from another of this process
	g.forget(now)
	if newest, known := g.epochs[e.Engine]; known && e.Epoch < newest {
		return fmt.Errorf("engine %q: %w", e.Engine, ErrStale)
	}
	s := g.byNonce[e.Nonce]
	if s == nil {
		s = &seen{nonce: e.Nonce, by: map[connector.RequestID]struct{}{}, first: now, keep: max(minMemory, 2*min(e.Lease, 24*time.Hour))}
		g.byNonce[e.Nonce], g.order = s, append(g.order, s)
	}
	if _, again := s.by[request]; again {
		return nil
	}
	if len(s.by) >= max(1, e.Consumers) {
		return fmt.Errorf("engine %q, hold %d: %w", e.Engine, e.Hold, ErrReplayed)
	}
	s.by[request] = struct{}{}
	g.uses++
	g.sawEpoch(e)
	return nil
}

// sawEpoch moves an engine on to its newest life. When there are too many engines some other one is
// forgotten, which costs no more than noticing its stale tickets late.
func (g *Guard) sawEpoch(e *Envelope) {
	if _, known := g.epochs[e.Engine]; !known && len(g.epochs) >= maxEngines {
		for engine := range g.epochs {
			delete(g.epochs, engine)
			break
		}
	}
	g.epochs[e.Engine] = e.Epoch
}

// forget drops the tickets that are over, and the oldest while there are too many.
func (g *Guard) forget(now time.Time) {
	for len(g.order) > 0 {
		s := g.order[0]
		if g.uses < maxUses && now.Sub(s.first) <= s.keep {
			return
		}
		g.order = g.order[1:]
		delete(g.byNonce, s.nonce)
		g.uses -= len(s.by)
	}
}
