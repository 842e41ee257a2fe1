package agent

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/sdk"
)

// wrongBinary begins what the test binary is called when it serves wrong connector number N; one more than the last is a right one.
const wrongBinary = "kvport-wrong-"

// serveWrong serves a connector of package mutants if the program was started by the name of one. What a connector that holds blocks for others
// can do beyond loads and saves is hidden, since it could not serve pages.
func serveWrong() {
	number, is := strings.CutPrefix(filepath.Base(os.Args[0]), wrongBinary)
	if !is {
		return
	}
	n, err := strconv.Atoi(number)
	if all := wrongConnectors(); err == nil && n < len(all) {
		p := all[n].Plugin()
		if p.Capabilities&connector.CanHold != 0 {
			p = mutants.Plain(p)
		}
		sdk.Serve(p)
	}
	os.Exit(2)
}

// wrongConnectors are those of package mutants, and a right one at the end.
func wrongConnectors() []mutants.Mutant {
	return append(mutants.All(), mutants.Mutant{Name: "a right store", Plugin: mutants.StoreReference})
}

// wrongDeadline is that of each call to a wrong connector. A mutant that takes its time takes 6 s.
const wrongDeadline = time.Second

// wrongSums are what a run has shown.
type wrongSums struct {
	deadline time.Duration // of each call

	served, refused, allFalse, right int // connectors
	done, failed                     int // pages of gets
	longest                          time.Duration
}

// An engine that stores pages with a connector that is wrong on purpose gets, of each page, the bytes that belong to its key, or is told that it
// is not there, and its other memory stays as it was. No call waits longer than its deadline, and the agent serves the next engine. All wrong
// connectors that need no server, with KVPORT_SOAK=1; else some, of which most are made of a Store.
func TestPagesOfWrongConnectors(t *testing.T) {
	s := wrongSums{deadline: wrongDeadline}
	all, elsewhere := wrongConnectors(), 0
	for n, m := range all[:len(all)-1] {
		if strings.Contains(m.Config, "@SERVER@") || m.Program != "" {
			elsewhere++
			continue
		}
		if n%share(m) != 0 {
			continue
		}
		t.Run(m.Name, func(t *testing.T) { s.play(t, n, m, `{"transfer": "1s", "save": "1s", "later": "1s"}`) })
	}
	t.Logf("%d wrong connectors served pages, %d were refused, %d need a server or a program of their own; of %d every get was false, of %d some were done, with the right bytes: %d pages done, %d not; longest call %s",
		s.served, s.refused, elsewhere, s.allFalse, s.right, s.done, s.failed, s.longest.Round(time.Millisecond))
	require.Positive(t, s.right)
}

// share is of how many wrong connectors one is played.
func share(m mutants.Mutant) int {
	switch {
	case os.Getenv("KVPORT_SOAK") != "":
		return 1
	case testing.Short():
		return 60
	case m.Plugin().Name == "StoreConnector":
		return 2
	}
	return 24
}

// The same calls to a right store bring every page that was stored: what the wrong ones did not bring is their fault.
func TestPagesOfARightConnector(t *testing.T) {
	s := wrongSums{deadline: time.Minute} // a busy machine is no fault
	all := wrongConnectors()
	s.play(t, len(all)-1, all[len(all)-1], `{"transfer": "1m", "save": "1m", "later": "1m"}`)
	require.Equal(t, 1, s.right)
	require.Equal(t, wrongStored, s.done)
}

// wrongStored is how many pages of play a store has that keeps them in its process, of which the second engine has another one.
const wrongStored = 6 + 6 + 12

// play stores pages, asks for them and for others, in several ways, and then as another engine.
func (s *wrongSums) play(t *testing.T, n int, m mutants.Mutant, deadlines string) {
	self, err := os.Executable()
	require.NoError(t, err)
	folder := t.TempDir()
	require.NoError(t, os.Symlink(self, filepath.Join(folder, wrongBinary+strconv.Itoa(n))))
	extra := strings.ReplaceAll(cmp.Or(m.Config, "{}"), "@TMP@", t.TempDir())
	a := openFrom(t, folder, fmt.Sprintf(`{"kv_connector": %q, "kv_role": "kv_both", "kv_connector_extra_config": %s, "kvport": {"heartbeat": {"limit": "1m"}, "deadlines": %s}}`,
		m.Plugin().Name, extra, deadlines), nil)
	p, refusal := tryPager(t, a.socket, pagesAt())
	if refusal != nil {
		t.Logf("refused: %s", refusal.GetMessage())
		s.refused++
		return
	}
	s.served++
	done := s.done
	mine, other := hashes("mine", 6), hashes("other", 6)
	s.get(p, mine, 0)
	s.put(p, mine, 0)
	s.exists(p, mine)
	s.get(p, mine, 20)
	s.get(p, slices.Concat(mine[3:], other[:2], mine[:3]), 30)
	s.put(p, other, 8)
	s.put(p, mine, 40)
	s.get(p, slices.Concat(other, mine), 1)
	s.exists(p, slices.Concat(mine[:2], other[:2], hashes("nobody's", 1), mine[2:]))
	p.getBy(mine, 50, time.Millisecond) // the answer of one that comes in time is right, too
	p.close()
	if p, refusal = nextPager(t, a.socket); refusal == nil {
		s.get(p, mine, 7)
	}
	if s.done == done {
		s.allFalse++
	} else {
		s.right++
	}
}

func (s *wrongSums) put(p *pager, keys []connector.BlockKey, first int) {
	p.t.Helper()
	defer s.took(time.Now())
	require.Len(p.t, p.putBy(keys, first, s.deadline), len(keys))
}

// get loads pages, whose bytes are judged.
func (s *wrongSums) get(p *pager, keys []connector.BlockKey, first int) {
	p.t.Helper()
	defer s.took(time.Now())
	for _, r := range p.getBy(keys, first, s.deadline) {
		if r == kvportv1.AgentPageResult_AGENT_PAGE_RESULT_DONE {
			s.done++
		} else {
			s.failed++
		}
	}
}

func (s *wrongSums) exists(p *pager, keys []connector.BlockKey) {
	p.t.Helper()
	defer s.took(time.Now())
	n, _ := p.existsBy(keys, s.deadline)
	require.LessOrEqual(p.t, n, len(keys))
}

// took notes the longest call. Each is awaited by process.find for a minute at most.
func (s *wrongSums) took(began time.Time) { s.longest = max(s.longest, time.Since(began)) }
