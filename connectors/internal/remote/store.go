package remote

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

const (
	batchBytes  = 4 << 20 // of one pipeline of values; a larger block goes alone
	batchKeys   = 1024    // of one pipeline of questions
	openTimeout = 2 * time.Second
)

// Store is a connector.Store on a server. Its memory is bounded: a connection gathers at most
// batchBytes, or one block.
type Store struct {
	served
	movers *lanes // for values
	asker  *lanes // for questions, so that they do not wait behind values
	all    []*lane
	absent absent
}

// Open connects to a server. One that refuses us or is of another kind is an error that names the
// field and wraps connector.ErrIncompatible. One that cannot be reached is not: it is logged, and
// blocks are computed until it can.
func Open(ctx context.Context, o Options) (*Store, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	redis.SetLogger(silent{})
	s := &Store{served: served{o: o}, movers: newLanes(o.Connections), asker: newLanes(1)}
	s.health.log, s.health.where = o.Log, o.where()
	for i := range o.Connections + 1 {
		l := newLane(&s.o)
		s.all = append(s.all, l)
		if i == 0 {
			s.asker.give(l)
			continue
		}
		s.movers.give(l)
	}
	ctx, cancel := context.WithTimeout(ctx, min(o.openTimeout, o.Timeout))
	defer cancel()
	if err := s.hello(ctx); err != nil {
		if bad := s.o.configError(err); bad != nil {
			return nil, errors.Join(bad, s.Close())
		}
		s.health.failed(s.o.scrub(err), patience, time.Now())
	}
	return s, nil
}

// hello is the first contact: a question of the kind that will be asked, and how the server is set up.
func (s *Store) hello(ctx context.Context) error {
	_, err := s.borrow(ctx, s.asker, func(ctx context.Context, l *lane) error {
		c := l.client
		if err := c.Exists(ctx, s.key(connector.StoreKey{})).Err(); err != nil {
			return err
		}
		memory, err := c.Info(ctx, "memory").Result()
		if err != nil {
			return nil //nolint:nilerr // a user that may not ask this may still store
		}
		policy, limit := infoField(memory, "maxmemory_policy"), infoField(memory, "maxmemory")
		if limit == "0" && !s.o.Cluster {
			s.o.Log.Warn("server has no memory limit, set maxmemory and an eviction policy such as allkeys-lru", "server", s.o.where())
		}
		s.o.Log.Info("connected", "server", s.o.where(), "maxmemory", limit, "policy", policy, "ttl", s.o.TTL, "tls", s.o.TLS != nil)
		return nil
	})
	return err
}

// infoField is the value of a field of an INFO answer.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Close implements connector.Store.
func (s *Store) Close() error {
	var errs []error
	for _, l := range s.all {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

func (s *Store) key(k connector.StoreKey) string { return s.o.Prefix + k.String() }

// borrow runs call on a free lane, within ctx and, once there is one, the configured time-out. silent is
// how long the server had sent nothing when it returned.
func (s *Store) borrow(ctx context.Context, lanes *lanes, call func(context.Context, *lane) error) (silent time.Duration, err error) {
	l := lanes.take(ctx)
	if l == nil {
		return 0, errNoLane
	}
	defer lanes.give(l)
	ctx, cancel := context.WithTimeout(ctx, s.o.Timeout)
	defer cancel()
	start := time.Now()
	err = l.run(ctx, call)
	if causeOf(err) == causeAway && !timeOut(err) {
		err = l.run(ctx, call) // on a new connection: the old one may have ended long ago, unnoticed
	}
	return l.silent(start), err
}

// errNoLane says that a call's time was over before a connection was free.
var errNoLane = errors.New("all connections are in use")

// do is borrow that minds the server's health.
func (s *Store) do(ctx context.Context, lanes *lanes, call func(context.Context, *lane) error) error {
	if err := s.health.ask(time.Now()); err != nil {
		return err
	}
	silent, err := s.borrow(ctx, lanes, call)
	switch {
	case err == nil:
		s.health.worked()
	case !errors.Is(err, errNoLane):
		s.health.failed(s.o.scrub(err), silent, time.Now())
	}
	return err
}

// Lookup implements connector.Store. While the server is away nothing is found.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	keys := distinct(runs)
	if len(keys) == 0 {
		return make([]int, len(runs)), nil
	}
	present, err := s.present(ctx, keys)
	if err != nil {
		if ctx.Err() == nil && causeOf(err) == causeBusy {
			return nil, s.o.explain(ctx, err)
		}
		return make([]int, len(runs)), ctx.Err()
	}
	s.absent.note(keys, present, time.Now())
	return storekit.Leading(runs, func(k connector.StoreKey) bool { return present[k] }), nil
}

// distinct are the keys of all runs, each once, in order.
func distinct(runs [][]connector.StoreKey) []connector.StoreKey {
	var keys []connector.StoreKey
	seen := map[connector.StoreKey]bool{}
	for _, run := range runs {
		for _, k := range run {
			if !seen[k] {
				seen[k] = true
				keys = append(keys, k)
			}
		}
	}
	return keys
}

// present asks which keys are there, many in one round trip.
func (s *Store) present(ctx context.Context, keys []connector.StoreKey) (map[connector.StoreKey]bool, error) {
	present := make(map[connector.StoreKey]bool, len(keys))
	for len(keys) > 0 {
		part := keys[:min(batchKeys, len(keys))]
		keys = keys[len(part):]
		err := s.do(ctx, s.asker, func(ctx context.Context, l *lane) error {
			pipe := l.client.Pipeline()
			answers := make([]*redis.IntCmd, len(part))
			for i, k := range part {
				answers[i] = pipe.Exists(ctx, s.key(k))
			}
			if _, err := pipe.Exec(ctx); err != nil {
				return err
			}
			for i, k := range part {
				present[k] = answers[i].Val() == 1
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return present, nil
}

// Get implements connector.Store.
func (s *Store) Get(ctx context.Context, items []connector.Item) error {
	return eachBatch(items, s.o.Connections, func(part []connector.Item) []error {
		errs := make([]error, len(part))
		replies := make([]*scatter, len(part))
		err := s.do(ctx, s.movers, func(ctx context.Context, l *lane) error {
			pipe := l.client.Pipeline()
			for i, it := range part {
				replies[i] = newScatter(it)
				_ = pipe.Process(ctx, redis.NewRawWriteToCmd(ctx, replies[i], "get", s.key(it.Key)))
			}
			_, err := pipe.Exec(ctx)
			return s.answered(ctx, l.client, replies, err)
		})
		for i, r := range replies {
			errs[i] = s.result(ctx, r, err)
		}
		return errs
	})
}

// answered gives the error of a pipeline of GETs as a whole: one of the connection, or one that the
// server answered to all alike. A cluster that has moved slots is asked where they are now.
func (s *Store) answered(ctx context.Context, c redis.UniversalClient, replies []*scatter, err error) error {
	if err != nil {
		return err
	}
	for _, r := range replies {
		if r.server == nil {
			continue
		}
		if cluster, ok := c.(*redis.ClusterClient); ok && causeOfText(r.server.Error()) == causeMode {
			cluster.ReloadState(ctx)
			r.server = fmt.Errorf("TRYAGAIN %w", r.server)
			continue
		}
		return answerError(r.server.Error())
	}
	return nil
}

// answerError is an error that the server gave, as go-redis has them.
type answerError string

// Error implements error.
func (e answerError) Error() string { return string(e) }

// RedisError implements redis.Error.
func (answerError) RedisError() {}

// result gives the error of one reply. all is that of the whole pipeline.
func (s *Store) result(ctx context.Context, r *scatter, all error) error {
	switch {
	case r == nil:
	case r.server != nil:
		all = answerError(r.server.Error())
	case errors.Is(r.err, errNoReply):
		all = cmp.Or(all, r.err)
	default:
		return s.received(r)
	}
	return s.o.explain(ctx, all)
}

// Put implements connector.Store. Blocks that are there as they are now are not sent again.
func (s *Store) Put(ctx context.Context, items []connector.Item) error {
	if err := s.health.room(time.Now()); err != nil {
		s.counts.Count(func(n *Stats) { n.Refused += uint64(len(items)) })
		return err
	}
	known, err := s.refresh(ctx, items)
	if err != nil {
		return s.o.explain(ctx, err)
	}
	return eachBatch(items, s.o.Connections, func(part []connector.Item) []error { return s.put(ctx, part, known) })
}

// refresh finds the blocks that the server already has and starts their time to live again. It does not ask for
// those that were missing just now.
func (s *Store) refresh(ctx context.Context, items []connector.Item) (map[connector.StoreKey]bool, error) {
	var ask []connector.Item
	now := time.Now()
	for _, it := range items {
		if !s.absent.take(it.Key, now) && !it.Replace {
			ask = append(ask, it)
		}
	}
	known := make(map[connector.StoreKey]bool, len(ask))
	for part := range slices.Chunk(ask, batchKeys) {
		err := s.do(ctx, s.movers, func(ctx context.Context, l *lane) error { return s.compare(ctx, l, part, known) })
		if err != nil {
			return nil, err
		}
	}
	return known, nil
}

// compare notes which blocks the server has as they are, as far as the length and the beginning of the digests say. What has
// another length or was made with another key counts as unknown, so that it is replaced.
func (s *Store) compare(ctx context.Context, l *lane, part []connector.Item, known map[connector.StoreKey]bool) error {
	pipe := l.client.Pipeline()
	lengths, marks := make([]*redis.IntCmd, len(part)), make([]*redis.StringCmd, len(part))
	for i, it := range part {
		key := s.key(it.Key)
		lengths[i] = pipe.StrLen(ctx, key)
		if mark, at := storekit.Mark(it); mark != nil {
			marks[i] = pipe.GetRange(ctx, key, int64(headerSize+at), int64(headerSize+at+len(mark)-1))
		}
		if s.o.TTL > 0 {
			pipe.PExpire(ctx, key, s.o.TTL)
		}
	}
	answers, err := pipe.Exec(ctx)
	if err != nil && !otherType(err) {
		return err
	}
	for _, a := range answers {
		if err := a.Err(); err != nil && !otherType(err) {
			return err
		}
	}
	for i, it := range part {
		mark, _ := storekit.Mark(it)
		known[it.Key] = lengths[i].Val() == int64(headerSize+it.Size()) && (mark == nil || marks[i].Val() == string(mark))
	}
	return nil
}

// otherType says that a key has a value that is no string, so that it is not ours.
func otherType(err error) bool { return strings.HasPrefix(err.Error(), "WRONGTYPE") }

// put sends the blocks of one batch that the server does not have.
func (s *Store) put(ctx context.Context, part []connector.Item, known map[connector.StoreKey]bool) []error {
	errs := make([]error, len(part))
	var todo []int
	var items []connector.Item
	for i, it := range part {
		switch {
		case known[it.Key] && !it.Replace:
			s.counts.Count(func(n *Stats) { n.Known++ })
		case headerSize+it.Size() > s.o.MaxValue:
			s.counts.Count(func(n *Stats) { n.Refused++ })
			errs[i] = fmt.Errorf("block of %d bytes is larger than the largest value, %d: %w", it.Size(), s.o.MaxValue, connector.ErrIncompatible)
		default:
			todo, items = append(todo, i), append(items, it)
		}
	}
	if len(todo) == 0 {
		return errs
	}
	answers := slices.Repeat([]error{errNoReply}, len(todo))
	err := s.do(ctx, s.movers, func(ctx context.Context, l *lane) error {
		return s.sendGathered(ctx, l, items, answers)
	})
	if err == nil {
		s.health.roomy()
	}
	for n, i := range todo {
		cause := answers[n]
		if errors.Is(cause, errNoReply) && err != nil {
			cause = err
		}
		if errs[i] = s.o.explain(ctx, cause); cause != nil {
			s.counts.Count(func(n *Stats) { n.Refused++ })
			continue
		}
		s.counts.Count(func(n *Stats) { n.wrote(part[i].Size()) })
	}
	return errs
}

const (
	absentTime = time.Minute // from the question to the save: a long prompt is computed
	absentMost = 1 << 16     // keys
)

// absent remembers keys that the server was asked for and did not have. An engine asks for the blocks of a prompt
// before it computes and saves them, so that a save need not ask again, which takes a round trip. Should another
// engine have saved a block meanwhile, it is written twice.
type absent struct {
	mu   sync.Mutex
	keys map[connector.StoreKey]time.Time // when they were asked for
}

// note takes down the keys of a question that were not there.
func (a *absent) note(keys []connector.StoreKey, present map[connector.StoreKey]bool, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.keys == nil || len(a.keys)+len(keys) > absentMost { // they were for nothing, or their time is over
		a.keys = map[connector.StoreKey]time.Time{}
	}
	for _, k := range keys[:min(len(keys), absentMost)] {
		if present[k] {
			delete(a.keys, k)
		} else {
			a.keys[k] = now
		}
	}
}

// take reports whether a key is known not to be there, and forgets it.
func (a *absent) take(k connector.StoreKey, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	asked, ok := a.keys[k]
	delete(a.keys, k)
	return ok && now.Sub(asked) < absentTime
}

// eachBatch runs do for every batch of the items, at most parallel at once, and returns when all have ended.
// The error is a *connector.ItemError that names the failed items.
func eachBatch(items []connector.Item, parallel int, do func([]connector.Item) []error) error {
	ends := batches(items)
	errs := make([]error, len(items))
	storekit.Parallel(len(ends), parallel, func(b int) {
		begin := 0
		if b > 0 {
			begin = ends[b-1]
		}
		copy(errs[begin:ends[b]], do(items[begin:ends[b]]))
	})
	return storekit.ItemError(errs)
}

// batches divides items so that each part has at most batchBytes, or one item. It gives the ends.
func batches(items []connector.Item) (ends []int) {
	size := 0
	for i, it := range items {
		if size += it.Size(); size > batchBytes && i > 0 && (len(ends) == 0 || ends[len(ends)-1] < i) {
			ends, size = append(ends, i), it.Size()
		}
	}
	if len(items) > 0 {
		ends = append(ends, len(items))
	}
	return ends
}

// sendGathered sends values with SET by way of go-redis, which finds the server of each in a cluster, and makes a
// connection if there is none. The answers are in errs, one for each item.
func (s *Store) sendGathered(ctx context.Context, l *lane, items []connector.Item, errs []error) error {
	size := 0
	for _, it := range items {
		size += headerSize + it.Size()
	}
	pipe := l.client.Pipeline()
	answers := make([]*redis.StatusCmd, len(items))
	gathered := slices.Grow(l.scratch[:0], size)
	for i, it := range items {
		begin := len(gathered)
		gathered = appendValue(gathered, it)
		answers[i] = pipe.Set(ctx, s.key(it.Key), gathered[begin:], s.o.TTL)
	}
	l.scratch = gathered
	_, err := pipe.Exec(ctx)
	for i := range answers {
		errs[i] = answers[i].Err()
	}
	return err
}

// A value is a header and the block's spans one after the other. The header says whose block it is
// and how long, so that a value of another key or shape is never taken for it:
//
//	0   8  magic "kvport/1"
//	8   8  length of what follows the header, little endian
//	16 32  the store key
const (
	magic      = "kvport/1"
	headerSize = len(magic) + 8 + 32
)

// appendValue appends the value of an item to b.
func appendValue(b []byte, it connector.Item) []byte {
	b = appendHeader(b, it)
	for _, s := range it.Spans {
		b = append(b, s...)
	}
	return b
}

// appendHeader appends the header of an item's value to b.
func appendHeader(b []byte, it connector.Item) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(it.Size()))
	return append(b, it.Key[:]...)
}

// checkHeader says what is wrong with a value's header. length is that of what follows it. A whole value of another
// length has been stored by another version.
func checkHeader(h []byte, it connector.Item, length int) error {
	size := binary.LittleEndian.Uint64(h[len(magic):])
	switch {
	case string(h[:len(magic)]) != magic:
		return fmt.Errorf("value of %s is none of ours: %w", short(it.Key), connector.ErrCorrupt)
	case !bytes.Equal(h[len(magic)+8:headerSize], it.Key[:]):
		return fmt.Errorf("value of %s belongs to another key: %w", short(it.Key), connector.ErrCorrupt)
	case size != uint64(length):
		return fmt.Errorf("value of %s has %d bytes, its header says %d: %w", short(it.Key), length, size, connector.ErrCorrupt)
	case length != it.Size():
		return fmt.Errorf("value of %s has %d bytes, want %d: %w", short(it.Key), length, it.Size(), connector.ErrOutdated)
	}
	return nil
}

// short is enough of a key for messages.
func short(k connector.StoreKey) string { return k.String()[:16] }

// scatter takes the raw reply to a GET and reads the value straight into an item's spans. It never
// fails itself, so that the connection stays in step with the server: what was wrong is in err.
type scatter struct {
	item   connector.Item
	length int   // that the server announced
	err    error // why the spans do not hold the block; nil once they do
	server error // what the server answered instead of a value
	begun  bool  // the first line was seen
}

var errNoReply = errors.New("no reply")

// newScatter makes the receiver of one item. Its err says that nothing came until something did.
func newScatter(it connector.Item) *scatter { return &scatter{item: it, err: errNoReply} }

// Write takes the reply's first line, and its end.
func (s *scatter) Write(line []byte) (int, error) {
	if s.begun || len(line) == 0 {
		return len(line), nil
	}
	s.begun = true
	kind, rest := line[0], string(bytes.TrimSpace(line[1:]))
	switch kind {
	case '-':
		s.server = errors.New(rest)
		s.err = s.server
		return len(line), nil
	case '$':
		n, err := strconv.Atoi(rest)
		if err == nil && n < 0 {
			s.err = fmt.Errorf("%s is not stored: %w", short(s.item.Key), connector.ErrGone)
			return len(line), nil
		}
		if s.length = n; err == nil {
			return len(line), nil
		}
	}
	s.length, s.err = -1, fmt.Errorf("reply to GET begins with %q: %w", kind, connector.ErrCorrupt)
	return len(line), nil
}

// ReadFrom implements io.ReaderFrom: it takes the value and the line end behind it.
func (s *scatter) ReadFrom(r io.Reader) (n int64, err error) {
	counted := &counter{r: r}
	err = s.value(counted)
	if err == nil {
		_, err = io.Copy(io.Discard, counted)
	}
	return counted.n, err
}

// value reads the value if it is the item's. It gives an error only if reading failed.
func (s *scatter) value(r io.Reader) error {
	want := headerSize + s.item.Size()
	if s.length < headerSize {
		s.err = fmt.Errorf("value of %s has %d bytes, want %d: %w", short(s.item.Key), s.length, want, connector.ErrCorrupt)
		return nil
	}
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return err
	}
	if s.err = checkHeader(header[:], s.item, s.length-headerSize); s.err != nil {
		return nil //nolint:nilerr // what was wrong with the value is in s.err; reading worked
	}
	s.err = errNoReply
	for _, span := range s.item.Spans {
		if _, err := io.ReadFull(r, span); err != nil {
			return err
		}
	}
	s.err = nil
	return nil
}

// counter counts what was read.
type counter struct {
	r io.Reader
	n int64
}

// Read implements io.Reader.
func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
