package kvindex

import (
	"math/bits"
	"reflect"
)

// table maps hashes to values. It is laid out to be small: a part of it grows by a fourth when it is seven eighths full,
// and shrinks when it is less than half full. It has many parts, so that growing never stops its user for long. Keys must be evenly distributed.
type table[V any] struct {
	shards [shards]shard[V]
	size   int
}

const (
	shards   = 256
	smallest = 8 // places of a shard that is not empty
)

// shard is an open-addressing hash table. A place is empty if its key is 0.
type shard[V any] struct {
	keys   []uint64
	values []V
	size   int
}

// nonzero keeps a hash from being taken for an empty place.
func nonzero(key uint64) uint64 {
	if key == 0 {
		return 1
	}
	return key
}

// get finds the value of a key; nil: there is none. The pointer is good until the next change of the table.
func (t *table[V]) get(key uint64) *V {
	s := &t.shards[key>>56]
	if s.size == 0 {
		return nil
	}
	if i, ok := s.find(key); ok {
		return &s.values[i]
	}
	return nil
}

// put finds the value of a key, or makes a zero one. The pointer is good until the next change of the table.
func (t *table[V]) put(key uint64) *V {
	s := &t.shards[key>>56]
	if (s.size+1)*8 > len(s.keys)*7 {
		s.resize(max(smallest, len(s.keys)+len(s.keys)/4))
	}
	i, ok := s.find(key)
	if !ok {
		s.keys[i] = key
		s.size++
		t.size++
	}
	return &s.values[i]
}

// remove takes a key out.
func (t *table[V]) remove(key uint64) {
	s := &t.shards[key>>56]
	if s.size == 0 {
		return
	}
	i, ok := s.find(key)
	if !ok {
		return
	}
	s.size--
	t.size--
	s.close(i)
	if len(s.keys) > smallest && s.size*2 < len(s.keys) {
		s.resize(max(smallest, s.size*5/4))
	}
}

// bytes is how much memory the places of the table take, the empty ones too.
func (t *table[V]) bytes() (sum int) {
	each := 8 + int(reflect.TypeFor[V]().Size())
	for i := range t.shards {
		sum += len(t.shards[i].keys) * each
	}
	return sum
}

// home is where a key belongs. Within a shard the first byte of all keys is the same.
func (s *shard[V]) home(key uint64) int {
	high, _ := bits.Mul64(key<<8, uint64(len(s.keys)))
	return int(high)
}

// find gives the place of a key, or the empty one where it would be. The shard has one at least.
func (s *shard[V]) find(key uint64) (place int, ok bool) {
	for i := s.home(key); ; i++ {
		if i == len(s.keys) {
			i = 0
		}
		if s.keys[i] == key || s.keys[i] == 0 {
			return i, s.keys[i] == key
		}
	}
}

// close empties a place and moves those behind it up that would not be found any more.
func (s *shard[V]) close(gap int) {
	n := len(s.keys)
	for i := gap; ; {
		if i++; i == n {
			i = 0
		}
		if s.keys[i] == 0 {
			break
		}
		if home := s.home(s.keys[i]); (i-home+n)%n >= (i-gap+n)%n { // its home is not behind the gap
			s.keys[gap], s.values[gap] = s.keys[i], s.values[i]
			gap = i
		}
	}
	var none V
	s.keys[gap], s.values[gap] = 0, none
}

func (s *shard[V]) resize(places int) {
	old := *s
	s.keys, s.values = make([]uint64, places), make([]V, places)
	for i, key := range old.keys {
		if key != 0 {
			at, _ := s.find(key)
			s.keys[at], s.values[at] = key, old.values[i]
		}
	}
}
