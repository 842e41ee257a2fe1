package sample

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// Stream turns the tokens of one generation into text as they come. It emits only complete UTF-8
// (each byte that can be part of none becomes U+FFFD) and nothing that may still turn out to be the
// start of a stop string. What it emits in all does not depend on where token boundaries fall.
type Stream struct {
	bytes   func(token int32) []byte
	stops   []string
	held    []byte // not yet emitted
	scanned int    // held[:scanned] ends no stop string
	stop    string // the stop string that was found
}

// NewStream reads a token's bytes through bytes (Tokenizer.Bytes). The text ends before the first
// stop string to complete; empty stop strings are ignored.
func NewStream(bytes func(token int32) []byte, stops []string) *Stream {
	return &Stream{bytes: bytes, stops: slices.DeleteFunc(slices.Clone(stops), func(stop string) bool { return stop == "" })}
}

// Push adds a token and returns the text that became certain. After a stop string it returns true,
// and the stream ignores further tokens.
func (s *Stream) Push(token int32) (text string, stopped bool) {
	if s.stop != "" {
		return "", true
	}
	s.held = append(s.held, s.bytes(token)...)
	for end := s.scanned + 1; end <= len(s.held); end++ {
		if stop := s.longestStop(s.held[:end]); stop != "" {
			s.stop = stop
			return s.take(end - len(stop)), true
		}
	}
	s.scanned = len(s.held)
	return s.take(s.certain()), false
}

// Flush ends the generation and returns what was held back.
func (s *Stream) Flush() string {
	if s.stop != "" {
		return ""
	}
	return s.take(len(s.held))
}

// Stopped is the stop string that ended the text, or empty.
func (s *Stream) Stopped() string { return s.stop }

// longestStop is the longest stop string that text ends with.
func (s *Stream) longestStop(text []byte) (found string) {
	for _, stop := range s.stops {
		if len(stop) > len(found) && strings.HasSuffix(string(text[max(0, len(text)-len(stop)):]), stop) {
			found = stop
		}
	}
	return found
}

// certain is the number of held bytes that are complete characters and no beginning of a stop string.
func (s *Stream) certain() int {
	n := len(s.held)
	for _, stop := range s.stops {
		for k := min(len(stop)-1, len(s.held)); k > 0; k-- {
			if strings.HasPrefix(stop, string(s.held[len(s.held)-k:])) {
				n = min(n, len(s.held)-k)
				break
			}
		}
	}
	return n - partial(s.held[:n])
}

// partial is the length of an unfinished UTF-8 sequence at the end of b.
func partial(b []byte) int {
	for k := 1; k <= min(len(b), utf8.UTFMax-1); k++ {
		if tail := b[len(b)-k:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return k
		}
	}
	return 0
}

func (s *Stream) take(n int) string {
	text := string([]rune(string(s.held[:n]))) // each invalid byte becomes U+FFFD
	s.held = append(s.held[:0], s.held[n:]...)
	s.scanned = max(0, s.scanned-n)
	return text
}
