package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/docs"
)

// run runs one case of the test's own.
func run(t *testing.T, deadline time.Duration, body func(T, Harness)) Result {
	t.Helper()
	c := Case{ID: "case", Rule: "RULE-01", Text: "It works.", Run: body}
	warmUp()
	return checkCase(t.Context(), c, InProcess(connector.Plugin{}, nil), settings{deadline: deadline})
}

// closing is a harness that takes its time to close.
type closing struct {
	Harness
	until <-chan struct{}
}

func (c closing) Close() error {
	<-c.until
	return c.Harness.Close()
}

// What a case ran with may close slowly, since it removes what the case has left; one that never closes says nothing of the connector.
func TestHarnessThatDoesNotClose(t *testing.T) {
	never := make(chan struct{})
	defer close(never)
	c := Case{ID: "case", Rule: "RULE-01", Text: "It works.", Run: func(T, Harness) {}}
	maker := func() (Harness, error) {
		h, err := InProcess(connector.Plugin{}, nil)()
		return closing{h, never}, err
	}
	r := checkCase(t.Context(), c, maker, settings{deadline: time.Millisecond})
	require.Equal(t, Inconclusive, r.Status, r.Log)
	require.Contains(t, r.Log[0], "what the case ran with does not close within ")

	ctx, cancel := context.WithCancel(t.Context())
	c.Run = func(T, Harness) { cancel() }
	began := time.Now()
	require.Equal(t, Inconclusive, checkCase(ctx, c, maker, settings{deadline: time.Hour}).Status)
	require.Less(t, time.Since(began), 30*time.Minute, "the run was interrupted, and does not wait")
}

// A case that runs again has four times as long, unless somebody has set its deadline.
func TestRepeatedCaseHasLonger(t *testing.T) {
	for _, fixed := range []bool{false, true} {
		var limit time.Duration
		var began time.Time
		c := Case{ID: "case", Rule: "RULE-01", Text: "It works.", Run: func(c T, _ Harness) {
			end, _ := c.Context().Deadline()
			limit = end.Sub(began)
		}}
		s := settings{deadline: defaultDeadline, fixed: fixed}
		for n := range 3 {
			want := defaultDeadline
			if n > 0 && !fixed {
				want = loadStretch * defaultDeadline
			}
			began = time.Now()
			require.Equal(t, Pass, checkCase(t.Context(), c, InProcess(connector.Plugin{}, nil), s).Status)
			require.GreaterOrEqual(t, limit, want)
			require.Less(t, limit, want+defaultDeadline, "run %d, fixed: %v", n, fixed)
			s = s.patient()
		}
	}
}

func TestOutcomes(t *testing.T) {
	require.Equal(t, Pass, run(t, time.Minute, func(T, Harness) {}).Status)

	r := run(t, time.Minute, func(c T, _ Harness) {
		c.Errorf("first %d", 1)
		c.Errorf("second")
	})
	require.Equal(t, Fail, r.Status)
	require.Equal(t, []string{"first 1", "second"}, r.Log)

	r = run(t, time.Minute, func(c T, _ Harness) {
		c.Errorf("no use to go on")
		c.FailNow()
		c.Errorf("went on")
	})
	require.Equal(t, []string{"no use to go on"}, r.Log)

	r = run(t, time.Minute, func(c T, _ Harness) { c.Skipf("does not apply") })
	require.Equal(t, Skip, r.Status)

	r = run(t, time.Minute, func(c T, _ Harness) {
		c.Errorf("failed before")
		c.Skipf("does not apply")
	})
	require.Equal(t, Fail, r.Status, "a failure stays one")

	r = run(t, time.Minute, func(T, Harness) { panic("ouch") })
	require.Equal(t, Fail, r.Status)
	require.Contains(t, r.Log[0], "panic: ouch")
}

func TestHangFailsTheCaseOnly(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the grace time of a hung case")
	}
	end := make(chan struct{})
	defer close(end)
	r := run(t, time.Second, func(c T, _ Harness) {
		<-end
		c.Errorf("after the report")
	})
	require.Contains(t, []Status{Fail, Inconclusive}, r.Status, "on a busy machine a late answer proves nothing")
	require.NotEmpty(t, r.Log)
	require.Contains(t, r.Log[0], "still running")
	require.Contains(t, r.Log[0], "TestHangFailsTheCaseOnly", "the report says where")
}

func TestDeadlineEndsTheCase(t *testing.T) {
	r := run(t, time.Second, func(c T, _ Harness) {
		<-c.Context().Done()
		c.Errorf("%v", c.Context().Err())
	})
	require.Equal(t, []string{context.DeadlineExceeded.Error()}, r.Log)
}

func TestLeaksAreSeen(t *testing.T) {
	before := takeSnapshot()
	end := make(chan struct{})
	for range 100 { // so many that none of an earlier test that ends meanwhile hides them
		go func() { <-end }()
	}
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	leak := before.waitForLeaks(0)
	require.Regexp(t, `\d\d goroutines more`, leak)
	require.Regexp(t, `\d file descriptors more`, leak)
	close(end)
	require.NoError(t, f.Close())
	require.Empty(t, before.waitForLeaks(grace))
}

func TestHarnessFolder(t *testing.T) {
	newHarness := InProcess(connector.Plugin{}, json.RawMessage(`{"a": "@TMP@/x", "b": "@TMP@"}`))
	first, err := newHarness()
	require.NoError(t, err)
	second, err := newHarness()
	require.NoError(t, err)
	var config struct{ A, B string }
	require.NoError(t, json.Unmarshal(first.Config(), &config))
	require.DirExists(t, config.B)
	require.Equal(t, config.B+"/x", config.A)
	require.NotEqual(t, string(first.Config()), string(second.Config()))
	require.NoError(t, first.Close())
	require.NoError(t, second.Close())
	require.NoDirExists(t, config.B)

	plain, err := InProcess(connector.Plugin{}, nil)()
	require.NoError(t, err)
	require.JSONEq(t, "{}", string(plain.Config()))
	require.NoError(t, plain.Close())
}

// A config may have a name that is new in every case, and a relay to a server that the suite does not know.
func TestNamesAndRelaysOfAConfig(t *testing.T) {
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	at := "@PROXY:" + listener.Addr().String() + "@"
	newHarness := InProcess(connector.Plugin{}, json.RawMessage(`{"a": "tcp://`+at+`/x", "b": "`+at+`", "name": "@UNIQUE@", "again": "@UNIQUE@"}`))
	var config, second struct{ A, B, Name, Again string }
	h, err := newHarness()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(h.Config(), &config))
	require.Equal(t, "tcp://"+config.B+"/x", config.A)
	require.NotEqual(t, listener.Addr().String(), config.B)
	require.Regexp(t, `^kvport[0-9a-f]{16}$`, config.Name)
	require.Equal(t, config.Name, config.Again)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", config.B)
	require.NoError(t, err)
	_, err = listener.Accept()
	require.NoError(t, err, "the relay leads to the server")
	require.NoError(t, conn.Close())
	other, err := newHarness()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(other.Config(), &second))
	require.NotEqual(t, config.Name, second.Name)
	require.NoError(t, other.Close())
	require.NoError(t, h.Close())
}

// What is meant to be a relay and is none is an error, which needs nothing but the text; other text is left alone.
func TestWordsOfAConfig(t *testing.T) {
	for _, wrong := range []string{
		"@PROXY:localhost@", "@PROXY:@", "@PROXY:localhost:1", "@PROXY@", "@PROXY::1@", "@PROXY:localhost:http@", "@PROXY:localhost:0@",
		"@PROXY:localhost:1/@UNIQUE@", "@PROXY:localhost:65536@", "@PROXY:localhost:1@ @PROXY:",
	} {
		_, err := InProcess(connector.Plugin{}, json.RawMessage(`{"a": "`+wrong+`", "b": 1}`))()
		require.ErrorContains(t, err, ": want @PROXY:HOST:PORT@", wrong)
		require.NotContains(t, err.Error(), `"b"`)
	}
	_, err := Proxied(json.RawMessage(`{"a": "@SERVER@", "b": "@PROXY:127.0.0.1:1@"}`))
	require.ErrorContains(t, err, "cases would hurt only one of the servers")
	for right, want := range map[string][]string{
		"@SERVER@": nil, "p@PROXY1": nil, "PROXY:": nil, "@PROXY:h:1@,@PROXY:[::1]:2@,@PROXY:h:1@": {"h:1", "[::1]:2"},
	} {
		got, err := Proxied(json.RawMessage(`{"a": "` + right + `"}`))
		require.NoError(t, err)
		require.Equal(t, want, got, right)
	}
}

// A server that the suite does not know is hurt on the way to it; what lies in it is nobody's to change.
func TestAnotherServer(t *testing.T) {
	body := func(t T, h Harness) {
		r := newRig(t, h)
		defer r.close()
		redisCase("id", "RULE-01", "It works.", func(*rig, *server) {}).Run(t, h)
	}
	config := json.RawMessage(`{"a": "@PROXY:127.0.0.1:1@"}`)
	plugin := connector.Plugin{Describe: func(context.Context, json.RawMessage) (connector.Info, error) {
		return connector.Info{Name: "nothing"}, nil
	}}
	r := checkCase(t.Context(), Case{ID: "case", Run: body}, InProcess(plugin, config), settings{deadline: time.Minute})
	o := Options{Profiles: []Profile{Remote}}
	require.Equal(t, Skip, o.judge(Case{Profiles: []Profile{Remote}}, r).Status, r.Log)
	r = checkCase(t.Context(), Case{ID: "case", Run: body}, InProcess(plugin, nil), settings{deadline: time.Minute})
	require.Equal(t, Fail, o.judge(Case{Profiles: []Profile{Remote}}, r).Status, r.Log)

	h, err := InProcess(plugin, config)()
	require.NoError(t, err)
	require.NoError(t, h.Close())
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	h, err = InProcess(plugin, json.RawMessage(`{"a": "@PROXY:`+listener.Addr().String()+`@"}`))()
	require.NoError(t, err)
	s := h.(*inProcess).remoteServer()
	require.NoError(t, s.Pause())
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.relays[0].Address())
	require.NoError(t, err)
	_, err = conn.Write([]byte{7})
	require.NoError(t, err)
	behind, err := listener.Accept()
	require.NoError(t, err)
	require.NoError(t, behind.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = behind.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "nothing arrives")
	require.NoError(t, s.Resume())
	require.NoError(t, behind.SetReadDeadline(time.Time{}))
	_, err = behind.Read(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, errors.Join(conn.Close(), behind.Close(), h.Close()))
}

// Where no connection is cut, a case that is about cuts says nothing: with a server of the suite, all of whose bytes pass the relay, it has
// failed, and with another, which may lead connectors elsewhere, it does not apply.
func TestNothingIsCut(t *testing.T) {
	server, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = server.Close() }()
	for address, want := range map[string]Status{"@SERVER@": Fail, "@PROXY:" + server.Addr().String() + "@": Skip} {
		config := json.RawMessage(`{"address": "` + address + `"}`)
		o := Options{Profiles: []Profile{Remote}, Only: []string{"remote-cut-load", "remote-cut-save"}}
		for _, r := range Check(t.Context(), InProcess(keeper(&values{}, true), config), o) {
			require.Equal(t, want, r.Status, r.ID)
			require.Contains(t, r.Log[0], "no connection was cut")
		}
	}
}

func TestHarnessThatCannotStart(t *testing.T) {
	rs := Check(t.Context(), func() (Harness, error) { return nil, errors.New("no room") }, Options{Only: []string{"probe", "computed"}})
	require.Len(t, rs, 2)
	for _, r := range rs {
		require.Equal(t, Fail, r.Status)
		require.Equal(t, []string{"start: no room"}, r.Log)
	}
	require.ErrorContains(t, Failed(rs), "no room")
}

// A connector that offers nothing passes nothing: skipped is failed where a profile requires it.
func TestSkippedIsFailedInAProfile(t *testing.T) {
	plugin := connector.Plugin{Describe: func(context.Context, json.RawMessage) (connector.Info, error) {
		return connector.Info{Name: "nothing", Scope: connector.ScopeEngine}, nil
	}}
	only := Options{Only: []string{"group-missing", "hold-order", "arena-kept"}}
	statuses := func(profiles ...Profile) (found []Status) {
		only.Profiles = profiles
		for _, r := range Check(t.Context(), InProcess(plugin, nil), only) {
			found = append(found, r.Status)
			if r.Status == Fail {
				require.Contains(t, r.Log[1], "profile groups requires this case")
			}
		}
		return found
	}
	require.Equal(t, []Status{Skip, Skip, Skip}, statuses(Store))
	require.Equal(t, []Status{Skip, Skip, Skip}, statuses(Power), "power requires what the connector declares")
	require.ElementsMatch(t, []Status{Fail, Skip, Skip}, statuses(Groups, Power))
}

// Only the cases of the profiles run, and those of powers that the connector may offer.
func TestProfilesChooseCases(t *testing.T) {
	for _, profile := range Profiles() {
		o := Options{Profiles: []Profile{profile}}
		for _, c := range o.cases() {
			require.True(t, slices.Contains(c.Profiles, profile) || c.Needs != 0 || c.Groups || c.Arena, "%s: %s", profile, c.ID)
		}
	}
	require.Len(t, (&Options{Profiles: Profiles()}).cases(), len(Cases()))
	require.Len(t, (&Options{Profiles: []Profile{Store}, Only: []string{"kill-save"}}).cases(), 1)
}

// What asks for something of the machine or the config is never failed for being skipped, and a
// process-level case is, where the harness has no process.
func TestOptionalCases(t *testing.T) {
	plugin := connector.Plugin{Describe: func(context.Context, json.RawMessage) (connector.Info, error) {
		return connector.Info{Name: "nothing", Scope: connector.ScopeEngine}, nil
	}}
	o := Options{Only: []string{"by-hand", "flipped", "disk-full"}, Profiles: []Profile{Lifecycle, Fault}}
	got := map[string]Status{}
	for _, r := range Check(t.Context(), InProcess(plugin, nil), o) {
		got[r.ID] = r.Status
		require.NotEmpty(t, r.Log)
	}
	require.Equal(t, map[string]Status{"by-hand": Fail, "flipped": Skip, "disk-full": Skip}, got)
}

// The folder is on a disk of its own, whose size and mode change, and which goes with its helper.
func TestSmallDisk(t *testing.T) {
	d, err := newSmallDisk("size=64k")
	if err != nil {
		t.Skip("this machine permits no file system of our own: ", err)
	}
	file := filepath.Join(d.path, "file")
	require.ErrorIs(t, os.WriteFile(file, make([]byte, 1<<20), 0o600), syscall.ENOSPC)
	require.NoError(t, os.Remove(file))
	require.NoError(t, d.remount("size=4m"))
	require.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	require.NoError(t, d.remount("ro"))
	require.ErrorIs(t, os.WriteFile(file, nil, 0o600), syscall.EROFS)
	require.Error(t, d.remount("no-such-option"))
	require.NoError(t, d.close())
	require.NoDirExists(t, d.path)
	require.NoDirExists(t, d.dir)
}

func sample() []Result {
	return []Result{
		{ID: "a", Rule: "WORK-01", Text: "One.", Status: Pass, Took: 1500 * time.Millisecond},
		{ID: "b", Rule: "WORK-02", Text: "Two.", Status: Fail, Log: []string{"line <1>", "line 2\nline 3"}},
		{ID: "c", Rule: "HOLD-01", Text: "Three.", Status: Skip, Log: []string{"not offered"}},
	}
}

// A case of a run shows its number, few of its lines and the last words of its process; what failed stands last.
func TestWriteTextOfARun(t *testing.T) {
	results := sample()
	for n := range results {
		results[n].Number, results[n].Of = n+1, 12
	}
	results[1].Log = slices.Repeat([]string{"a line"}, 9)
	results[1].LastWords = []string{"the plugin's process 7 ended by itself: exit status 2; the last lines of its standard error:", "  panic: ouch"}
	results[2].Status, results[2].Again = Inconclusive, true
	var b bytes.Buffer
	results[0].Left = 83*time.Second + 400*time.Millisecond
	require.NoError(t, WriteText(&b, results))
	require.Equal(t, ` 1/12  1m23s left   pass  WORK-01     a                     One.
 2/12               fail  WORK-02     b                     Two.
      a line
      a line
      a line
      a line
      a line
      ... and 4 lines more, see --format json
      the plugin's process 7 ended by itself: exit status 2; the last lines of its standard error:
        panic: ouch
 3/12               inconclusive  HOLD-01     c                     Three.
      not offered
      it will run again when the other cases have ended
These did not pass:
fail  WORK-02     b                     Two.
        came:     a line
        died:     the plugin's process 7 ended by itself: exit status 2: panic: ouch
        rule:     A Load that cannot get some blocks names exactly those in a BlockError, and fills all others, also those whose key comes twice.
        look at:  returning one error for a whole transfer if only one block is missing
inconclusive  HOLD-01     c                     Three.
        came:     not offered
        rule:     Finish answers every Ended, in order; a request that no consumer was announced for, or that has no blocks, is not held.
1 passed, 1 failed, 0 skipped, 1 inconclusive
`, b.String())
	b.Reset()
	require.NoError(t, WriteJSON(&b, results[1:2]))
	require.Contains(t, b.String(), `"last_words":["the plugin's process 7 ended`)
	require.Contains(t, b.String(), `"n":2,"of":12`)
	b.Reset()
	require.NoError(t, WriteJUnit(&b, "kvport-x", results))
	require.Contains(t, b.String(), `errors="1"`)
	require.Contains(t, b.String(), "panic: ouch")
}

// A case that is inconclusive runs again when the others have ended, twice at most, and each end is told.
func TestInconclusiveRunsAgain(t *testing.T) {
	plugin := connector.Plugin{Describe: func(context.Context, json.RawMessage) (connector.Info, error) {
		return connector.Info{Name: "nothing"}, nil
	}}
	var order []string
	c := checker{newHarness: InProcess(plugin, nil), Options: Options{Progress: func(r Result) {
		order = append(order, fmt.Sprintf("%s %s %v", r.ID, r.Status, r.Again))
	}}}
	c.settings = c.prepare(t.Context(), c.newHarness)
	tries := map[string]int{}
	doubtful := func(id string, doubts int) Case {
		return Case{ID: id, Run: rigged(0, false, func(r *rig) {
			if tries[id]++; tries[id] <= doubts {
				r.inconclusive("try %d", tries[id])
			}
		})}
	}
	c.all = []Case{doubtful("once", 1), doubtful("never", 0), doubtful("always", 9)}
	results := c.run(t.Context())
	require.Equal(t, []string{
		"once inconclusive true", "never pass false", "always inconclusive true",
		"once pass false", "always inconclusive true",
		"always inconclusive false",
	}, order)
	require.Equal(t, []Status{Pass, Pass, Inconclusive}, []Status{results[0].Status, results[1].Status, results[2].Status})
	require.Equal(t, map[string]int{"once": 2, "never": 1, "always": 3}, tries)
	require.NoError(t, Failed(results))
}

// In go test, too, a case without a verdict has not passed; whoever must be green beside other work says so.
func TestInconclusiveFails(t *testing.T) {
	t.Setenv(MayBeInconclusive, "")
	require.Equal(t, "rule WORK-04: there is no verdict after 3 runs of the case: late",
		complaint(Result{Rule: "WORK-04", Status: Inconclusive, Log: []string{"late", "later"}}))
	for status, want := range map[Status]string{Fail: "rule X-01: It works.", Skip: "", Pass: ""} {
		require.Equal(t, want, complaint(Result{Rule: "X-01", Text: "It works.", Status: status}))
	}
	t.Setenv(MayBeInconclusive, "1")
	require.Empty(t, complaint(Result{Rule: "WORK-04", Status: Inconclusive}))
}

// What ends a run leaves the results of the cases until then, and of the case under way that it was interrupted.
func TestRunIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := checker{newHarness: InProcess(connector.Plugin{}, nil)}
	c.settings = settings{deadline: time.Minute}
	c.all = []Case{
		{ID: "first", Run: func(T, Harness) {}},
		{ID: "second", Run: func(c T, _ Harness) {
			cancel()
			c.Errorf("what fails for that: %v", c.Context().Err())
		}},
		{ID: "third", Run: func(T, Harness) { panic("it does not run") }},
	}
	results := c.run(ctx)
	require.Len(t, results, 2)
	require.Equal(t, Pass, results[0].Status)
	require.Equal(t, Inconclusive, results[1].Status)
	require.False(t, results[1].Again)
	require.Contains(t, results[1].Log, "interrupted before it had ended")
}

func TestFailFast(t *testing.T) {
	c := checker{newHarness: InProcess(connector.Plugin{}, nil), settings: settings{deadline: time.Minute}}
	c.FailFast = true
	c.all = []Case{{ID: "first", Run: func(T, Harness) {}}, {ID: "second", Run: func(c T, _ Harness) { c.Errorf("wrong") }}, {ID: "third"}}
	require.Len(t, c.run(t.Context()), 2)
}

// A case that does not exist is no case that passed.
func TestUnknownCaseFails(t *testing.T) {
	rs := Check(t.Context(), InProcess(connector.Plugin{}, nil), Options{Only: []string{"rond-trip"}})
	require.ErrorContains(t, Failed(rs), `no case is called "rond-trip"`)
}

// What is late is a failure, unless the machine was busy: then it says nothing.
func TestLateOnABusyMachine(t *testing.T) {
	late := func(lost time.Duration) Result {
		return run(t, time.Minute, func(c T, h Harness) {
			r := newRig(c, h)
			l := r.watched()
			l.mu.Lock()
			l.marks[0].at = time.Now().Add(-time.Second)
			l.marks = append(l.marks, mark{time.Now(), lost})
			l.mu.Unlock()
			r.late(time.Now().Add(-time.Second), "Load had not returned")
		})
	}
	require.Equal(t, Fail, late(0).Status)
	require.Equal(t, Fail, late(200*time.Millisecond).Status)
	r := late(700 * time.Millisecond)
	require.Equal(t, Inconclusive, r.Status)
	require.Contains(t, r.Log[0], "Load had not returned; the machine was busy")
}

// A wait is as long as the connector needs to have had its time, and four times as long at most.
func TestPatience(t *testing.T) {
	began := time.Now().Add(-2 * time.Second)
	for lost, over := range map[time.Duration]bool{0: true, 900 * time.Millisecond: true, 1500 * time.Millisecond: false} {
		l := &load{marks: []mark{{at: began}, {time.Now(), lost}}}
		require.Equal(t, over, wait{l, began, time.Second}.over(), "lost %v", lost)
	}
	l := &load{marks: []mark{{at: began}, {time.Now(), 2 * time.Second}}}
	require.True(t, wait{l, began, 500 * time.Millisecond}.over())
}

func TestWriteText(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, WriteText(&b, sample()))
	require.Equal(t, `pass  WORK-01     a                     One.
fail  WORK-02     b                     Two.
      line <1>
      line 2
      line 3
skip  HOLD-01     c                     Three. (not offered)
These did not pass:
fail  WORK-02     b                     Two.
        came:     line <1>
        rule:     A Load that cannot get some blocks names exactly those in a BlockError, and fills all others, also those whose key comes twice.
        look at:  returning one error for a whole transfer if only one block is missing
1 passed, 1 failed, 1 skipped
`, b.String())
}

// What a specific rule says comes before what a broad one says, and a random history has what would have been right.
func TestSummary(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, WriteSummary(&b, []Result{
		{ID: "round-trip", Rule: "WORK-01", Text: "One.", Status: Fail, Log: []string{"it differs"}},
		{ID: "doubtful", Rule: "KEY-05", Text: "Three.", Status: Inconclusive, Log: []string{"it was late"}},
		{ID: "hold-order", Rule: "WORK-02", Text: "Four.", Status: Fail, Log: []string{"not offered", "profile power requires this case"}, required: "profile power requires this case"},
		{ID: "random", Rule: "STORE-06", Text: "Two.", Status: Fail, Log: []string{"STORE-06: a load gives b1 bytes that are not stored any more"}, Allowed: "the bytes of b1'"},
		{ID: "remote-full", Status: Skip, Log: []string{"the config names no server"}, excused: true},
		{ID: "hold-waits", Status: Skip, Log: []string{"not offered"}},
		{ID: "other", Status: Skip, Log: []string{"there is no disk"}, excused: true},
		{ID: "remote-busy", Status: Skip, Log: []string{"the config names no server"}, excused: true},
	}))
	require.Equal(t, `These did not pass:
fail  WORK-02     hold-order            Four.
        came:     not offered
        allowed:  a pass: profile power requires this case
        look at:  what the connector offers, its config, or leave out the profile
fail  STORE-06    random                Two.
        came:     a load gives b1 bytes that are not stored any more
        allowed:  the bytes of b1'
        rule:     A Save with Replace overwrites what is stored with the blocks. While it runs, and after it failed, what was there may be gone (unlike STORE-05); what can be matched is whole (WORK-08).
fail  WORK-01     round-trip            One.
        came:     it differs
        rule:     What one engine saved another loads, byte for byte, as far as the connector's Scope reaches.
inconclusive  KEY-05      doubtful              Three.
        came:     it was late
        rule:     `+docs.Rule("KEY-05")+`
These did not run, since the config names no server: remote-full, remote-busy
These did not run, since there is no disk: other
0 passed, 3 failed, 4 skipped, 1 inconclusive
`, b.String())
	require.True(t, slices.IsSortedFunc(broadRules(), func(x, y string) int { return breadth(x) - breadth(y) }))
	for _, rule := range broadRules() {
		require.NotEmpty(t, docs.Rule(rule), rule)
	}
}

// The estimate of what is left counts the budgets of cases that have one.
func TestTimeLeft(t *testing.T) {
	c := checker{settings: settings{budget: time.Minute}, ran: 2, took: 4 * time.Second}
	c.all = []Case{{}, {}, {}, {budgeted: true}}
	c.results = make([]Result, 1)
	require.Equal(t, time.Minute+2*time.Second, c.left())
	c.results = make([]Result, 4)
	require.Zero(t, c.left())
	c.ran, c.results = 0, make([]Result, 1)
	require.Zero(t, c.left(), "how long a case takes is not known")
	c.results = make([]Result, 2)
	require.Equal(t, time.Minute, c.left(), "budgets are known")
	c.FailFast, c.failed = true, true
	require.Zero(t, c.left())
}

func TestWriteJSON(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, WriteJSON(&b, sample()))
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	require.Len(t, lines, 3)
	require.JSONEq(t, `{"id": "a", "rule": "WORK-01", "status": "pass", "log": []}`, lines[0])
	require.JSONEq(t, `{"id": "b", "rule": "WORK-02", "status": "fail", "log": ["line <1>", "line 2\nline 3"]}`, lines[1])
}

func TestWriteJUnit(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, WriteJUnit(&b, "kvport-x", sample()))
	var back junitSuite
	require.NoError(t, xml.Unmarshal(b.Bytes(), &back))
	require.Equal(t, "kvport-x", back.Name)
	require.Equal(t, []int{3, 1, 1}, []int{back.Tests, back.Failures, back.Skipped})
	require.Equal(t, "1.500", back.Time)
	require.Equal(t, "line <1>\nline 2\nline 3", back.Cases[1].Failure.Text)
	require.Equal(t, "not offered", back.Cases[2].Skipped.Text)
}
