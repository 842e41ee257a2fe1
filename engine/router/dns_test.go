package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/kvport/kvport/verify/testkit"
)

// Names are looked up at a real server: addresses of either kind, and SRV records with their ports.
func TestDNSAnswers(t *testing.T) {
	s := testkit.ServeDNS(t)
	s.Set("both.test.", testkit.AddressRecord("10.0.0.2"), testkit.AddressRecord("10.0.0.1"), testkit.AddressRecord("2001:db8::1"), testkit.AddressRecord("0.0.0.0"), testkit.AddressRecord("10.0.0.1"))
	s.Set("six.test.", testkit.AddressRecord("2001:db8::1"))
	s.Set("_http._tcp.srv.test.", testkit.ServiceRecord("Pod-1.srv.test.", 8001), testkit.ServiceRecord("pod-0.srv.test.", 8000), testkit.ServiceRecord("pod-2.srv.test.", 0))
	s.Set("pod-0.srv.test.", testkit.AddressRecord("10.0.2.1"), testkit.AddressRecord("2001:db8::1"))
	s.Set("pod-1.srv.test.", testkit.AddressRecord("10.0.2.2"))
	s.Set("_http._tcp.gone.test.", testkit.ServiceRecord("pod-0.srv.test.", 1), testkit.ServiceRecord("pod-9.srv.test.", 2), testkit.ServiceRecord(".", 3))
	s.Set("none.test.", testkit.AddressRecord("0.0.0.0"))
	l := newLookups(DNS{Resolver: s.Resolver()}, nil, nil)
	for text, want := range map[string]string{
		"dns://both.test.:80":              "[http://10.0.0.1:80 http://10.0.0.2:80]",
		"dns://six.test.:80":               "[http://[2001:db8::1]:80]",
		"dns+srv://_http._tcp.srv.test./":  "[http://10.0.2.1:8000 http://10.0.2.2:8001]",
		"dns+srv://_http._tcp.gone.test.":  "[http://10.0.2.1:1]",
		"dns://none.test.:80":              "the answer has no instance",
		"dns://unknown.test.:80":           "no such host",
		"dns+srv://_http._tcp.other.test.": "no such host",
	} {
		n, is, err := parseDNS(text)
		require.NoError(t, err)
		require.True(t, is)
		got := l.lookup(t.Context(), n)
		if got.err != nil {
			require.ErrorContains(t, got.err, want, text)
			require.True(t, isMissing(got.err), text)
			continue
		}
		require.Equal(t, want, fmt.Sprint(got.urls))
	}
	var many []dnsmessage.ResourceBody
	for i := range 20 {
		many = append(many, testkit.AddressRecord(fmt.Sprintf("10.0.1.%d", i)))
	}
	s.Set("many.test.", many...)
	got := l.lookup(t.Context(), dnsName{host: "many.test.", port: 1})
	require.NoError(t, got.err)
	require.Len(t, got.urls, 20)
}

// serviceResolver also has SRV records.
type serviceResolver struct {
	fakeResolver
	records []*net.SRV
}

func (r *serviceResolver) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return "", slices.Clone(r.records), nil
}

// Of a name with too many instances the first are used, whatever the order of the answer is, and the log says so once.
func TestTooManyAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &serviceResolver{fakeResolver: fakeResolver{names: map[string][]string{}}}
		var many []string
		for i := range 2 * maxAnswers {
			many = append(many, fmt.Sprintf("10.0.%d.%d", i/100, i%100))
			fake.names[fmt.Sprintf("pod-%03d", i)] = []string{fmt.Sprintf("10.1.%d.%d", i/100, i%100)}
			fake.records = append(fake.records, &net.SRV{Target: fmt.Sprintf("pod-%03d", i), Port: 80})
		}
		p := newTestPool(t)
		var log testkit.Log
		p.log = logTo(&log)
		l := newLookups(DNS{Resolver: fake, Interval: time.Second}, p, p.metrics)
		l.set(byFlag, []dnsName{{role: decode, text: "a", host: "many", port: 80}, {role: decode, text: "s", host: "_http._tcp.many", srv: true}})
		has := func() []string { return urlsOf(p) }
		fake.set(nil, "many", many...)
		stop := look(t, l)
		first := has()
		require.Len(t, first, 2*maxAnswers)
		require.Contains(t, first, "http://10.1.2.55:80", "pod-255")
		require.NotContains(t, first, "http://10.1.2.56:80")
		fake.mu.Lock()
		slices.Reverse(many)
		slices.Reverse(fake.records)
		fake.mu.Unlock()
		fake.set(nil, "many", many...)
		<-time.After(2500 * time.Millisecond) // of synctest
		require.Equal(t, first, has())
		require.Equal(t, 6.0, testutil.ToFloat64(p.metrics.lookups.WithLabelValues("cut")))
		require.Equal(t, 2, strings.Count(log.String(), "name has too many instances"))
		require.Equal(t, 2, strings.Count(log.String(), "instances=256 left_out=256"))
		fake.set(nil, "many", many[:maxAnswers]...)
		<-time.After(time.Second) // of synctest
		require.Len(t, has(), 2*maxAnswers)
		require.Equal(t, 1.0, testutil.ToFloat64(p.metrics.lookups.WithLabelValues("ok")))
		stop()
	})
}

func TestParseDNS(t *testing.T) {
	for _, text := range []string{"http://x", "dns", "x:80", "https://dns://x:80"} {
		_, is, err := parseDNS(text)
		require.NoError(t, err)
		require.False(t, is, text)
	}
	for _, text := range []string{
		"dns://", "dns://x", "dns://x:", "dns://x:0", "dns://x:99999", "dns://10.0.0.1:80", "dns://[::1]:80", "dns://a b:80", "dns://x:80/path", "dns://u@x:80",
		"dns+srv://", "dns+srv://x", "dns+srv://_http._tcp.x:80", "dns+srv://_http._tcp.x/y",
	} {
		_, is, err := parseDNS(text)
		require.True(t, is)
		require.ErrorContains(t, err, "want dns", text)
	}
}

func FuzzParseDNS(f *testing.F) {
	f.Add("dns://x:80")
	f.Add("dns+srv://_http._tcp.x")
	f.Fuzz(func(t *testing.T, text string) {
		n, is, err := parseDNS(text)
		if is && err == nil {
			require.True(t, isName(n.host))
			require.Equal(t, !n.srv, n.port != 0)
		}
	})
}

// fakeResolver answers as the test says.
type fakeResolver struct {
	mu    sync.Mutex
	names map[string][]string
	fails error
	asked int
}

func (r *fakeResolver) LookupNetIP(_ context.Context, _, host string) (list []netip.Addr, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	for _, a := range r.names[host] {
		list = append(list, netip.MustParseAddr(a))
	}
	return list, r.fails
}

func (r *fakeResolver) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	return "", nil, errors.New("no SRV here")
}

func (r *fakeResolver) set(fails error, host string, addresses ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[host], r.fails = addresses, fails
}

// Instances come and go with the answers. While no server answers, those that were found last stay, down or not. When a
// server says that there is no such name, they stay for a while after it was last found, whatever else fails meanwhile.
func TestDNSOverTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeResolver{names: map[string][]string{}}
		fake.set(nil, "p", "10.0.0.1", "10.0.0.2")
		p := newTestPool(t)
		l := newLookups(DNS{Resolver: fake, Interval: time.Second, Keep: 10 * time.Second}, p, p.metrics)
		name, _, err := parseDNS("dns://p:80")
		require.NoError(t, err)
		l.set(byFlag, []dnsName{name})
		stop := look(t, l)
		has := func() []string { return urlsOf(p) }
		later := func(d time.Duration) []string {
			<-time.After(d) // of synctest
			return has()
		}
		require.Equal(t, []string{"http://10.0.0.1:80", "http://10.0.0.2:80"}, has())
		fake.set(nil, "p", "10.0.0.2", "10.0.0.3")
		require.Equal(t, []string{"http://10.0.0.2:80", "http://10.0.0.3:80"}, later(1001*time.Millisecond))
		silent := errors.New("server misbehaving")
		fake.set(silent, "p")
		p.probed(p.find(prefill, at(t, "http://10.0.0.2:80")), refused)
		require.Len(t, later(time.Hour), 2, "it may only be restarted, and no server says that it is gone")
		fake.set(nil, "p", "10.0.0.3")
		require.Equal(t, []string{"http://10.0.0.3:80"}, later(time.Second))
		for i := range 9 { // kinds of failure by turns
			fake.set([]error{silent, &net.DNSError{Err: "no such host", IsNotFound: true}}[i%2], "p")
			require.Len(t, later(time.Second), 1)
		}
		require.Empty(t, later(2*time.Second))
		fake.set(nil, "p", "10.0.0.4")
		require.Equal(t, []string{"http://10.0.0.4:80"}, later(time.Second))
		require.Positive(t, testutil.ToFloat64(p.metrics.lookups.WithLabelValues("failed")))

		asked := fake.asked
		other, _, err := parseDNS("dns://q:81")
		require.NoError(t, err)
		other.drain = true
		fake.set(nil, "q", "10.0.0.9")
		fake.set(nil, "p", "10.0.0.4")
		l.set(byFile, []dnsName{other})
		require.Len(t, has(), 2, "a name that is new is looked up at once")
		require.Equal(t, asked+2, fake.asked)
		require.Equal(t, "draining", p.health().instances[1].State)
		l.set(byFile, nil)
		require.Len(t, has(), 1)
		stop()
	})
}

// hangingResolver answers nothing about one name until it speaks.
type hangingResolver struct {
	fakeResolver
	silent string
	speaks chan struct{} // closed then; nil: never
}

func (r *hangingResolver) LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error) {
	if host == r.silent {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-r.speaks:
		}
	}
	return r.fakeResolver.LookupNetIP(ctx, network, host)
}

// urlsOf are the URLs of a pool's instances in order, once all that runs has come to rest.
func urlsOf(p *pool) (list []string) {
	synctest.Wait()
	for _, in := range p.health().instances {
		list = append(list, in.URL)
	}
	slices.Sort(list)
	return list
}

// look lets names be looked up, until stop has returned.
func look(t *testing.T, l *lookups) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// A name about which no server says anything delays no other.
func TestSlowNameDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &hangingResolver{fakeResolver: fakeResolver{names: map[string][]string{}}, silent: "slow"}
		fake.set(nil, "p", "10.0.0.1")
		p := newTestPool(t)
		l := newLookups(DNS{Resolver: fake, Interval: time.Second, Timeout: time.Minute}, p, p.metrics)
		l.set(byFlag, []dnsName{{role: decode, text: "slow", host: "slow", port: 80}, {role: decode, text: "p", host: "p", port: 80}})
		stop := look(t, l)
		synctest.Wait()
		require.Equal(t, "http://10.0.0.1:80", p.health().instances[0].URL)
		fake.set(nil, "p", "10.0.0.2")
		<-time.After(1001 * time.Millisecond) // of synctest
		synctest.Wait()
		require.Equal(t, "http://10.0.0.2:80", p.health().instances[0].URL)
		stop()
	})
}

// A name that takes the place of another empties the pool at no time: what the router knows of instances that have both
// stays. Names that count no more are forgotten.
func TestRenamedName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &hangingResolver{fakeResolver: fakeResolver{names: map[string][]string{}}, silent: "new", speaks: make(chan struct{})}
		fake.set(nil, "old", "10.0.0.1", "10.0.0.2")
		fake.set(nil, "new", "10.0.0.2", "10.0.0.3")
		p := newTestPool(t)
		var log testkit.Log
		p.log = logTo(&log)
		l := newLookups(DNS{Resolver: fake, Timeout: time.Minute}, p, p.metrics)
		given := func(names ...string) (list []string) {
			var all []dnsName
			for _, name := range names {
				all = append(all, dnsName{role: decode, text: name, host: name, port: 80})
			}
			l.set(byFile, all)
			synctest.Wait()
			for _, in := range p.health().instances {
				list = append(list, strings.TrimPrefix(in.URL, "http://"))
			}
			slices.Sort(list)
			return list
		}
		stop := look(t, l)
		old := []string{"10.0.0.1:80", "10.0.0.2:80"}
		require.Equal(t, old, given("old"))
		require.Equal(t, old, given("new"))
		require.Equal(t, old, given("new", "none"))
		<-time.After(30 * time.Second) // of synctest
		require.Equal(t, old, given("new"), "which is still looked up")
		require.NotContains(t, log.String(), "instance leaves")
		close(fake.speaks)
		require.Equal(t, []string{"10.0.0.2:80", "10.0.0.3:80"}, given("new"))
		require.Equal(t, 1, strings.Count(log.String(), "instance leaves"), "10.0.0.1")
		require.Empty(t, given("none"), "it has been looked up, and failed")
		<-time.After(10 * time.Second) // of synctest
		synctest.Wait()
		require.Len(t, l.answers, 1)
		stop()
	})
}

// Of several names that say different groups of an instance the first of the list counts, whichever is found first.
func TestFirstNameSaysGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &hangingResolver{fakeResolver: fakeResolver{names: map[string][]string{}}, silent: "a", speaks: make(chan struct{})}
		fake.set(nil, "a", "10.0.0.1")
		fake.set(nil, "b", "10.0.0.1")
		p := newTestPool(t)
		l := newLookups(DNS{Resolver: fake, Timeout: time.Minute}, p, p.metrics)
		l.set(byFlag, []dnsName{{role: decode, group: "a", text: "a", host: "a", port: 80}, {role: decode, group: "b", text: "b", host: "b", port: 80}})
		stop := look(t, l)
		synctest.Wait()
		require.Equal(t, "b", p.health().instances[0].Group)
		close(fake.speaks)
		synctest.Wait()
		require.Equal(t, "a", p.health().instances[0].Group)
		stop()
	})
}

// Names in flags and in the file are found by a running router.
func TestRouterFindsNames(t *testing.T) {
	d := serveInstance(t, tokens)
	_, port, err := net.SplitHostPort(strings.TrimPrefix(d.URL, "http://"))
	require.NoError(t, err)
	fake := &fakeResolver{names: map[string][]string{"decode": {"127.0.0.1"}}}
	f := serveRouter(t, Config{Decode: []string{"dns://decode:" + port}, DNS: DNS{Resolver: fake}, Log: slog.New(slog.DiscardHandler)})
	require.Equal(t, "no decode instance is available", f.router.Ready())
	running(t, f.router)
	require.Eventually(t, func() bool { return f.router.Ready() == "" }, waitLimit, waitTick)
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
}
