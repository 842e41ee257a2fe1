package router

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/internal/register"
)

// Resolver looks names up; *net.Resolver does.
type Resolver interface {
	// LookupNetIP finds the addresses of a name; network is ip for both families.
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	// LookupSRV finds the SRV records of a name. service and proto are empty: name has all.
	LookupSRV(ctx context.Context, service, proto, name string) (cname string, records []*net.SRV, err error)
}

// DNS says how instances are found that are given as dns://NAME:PORT or dns+srv://NAME. Zero values mean the defaults
// named.
type DNS struct {
	Resolver Resolver      // nil: that of the system
	Interval time.Duration // between two lookups of a name, since answers come without their TTL; 5 s
	Keep     time.Duration // how long instances stay, from when the name was last found, once a server says that it has none; 1 min
	Timeout  time.Duration // of one lookup, with those of the targets of SRV records; 5 s
}

// What DNS names begin with.
const (
	schemeDNS = "dns"
	schemeSRV = "dns+srv"
)

// maxAnswers is how many instances of one name are used.
const maxAnswers = 256

// dnsName is a name that stands for instances.
type dnsName struct {
	role  role
	group string
	drain bool
	text  string // as it was given
	srv   bool
	host  string
	port  uint16 // of addresses
}

// parseDNS reads a name; is says whether the text has the form of one.
func parseDNS(text string) (n dnsName, is bool, err error) {
	scheme, rest, found := strings.Cut(text, "://")
	if !found || scheme != schemeDNS && scheme != schemeSRV {
		return dnsName{}, false, nil
	}
	n.text = text
	if scheme == schemeSRV {
		n.srv, n.host = true, strings.TrimSuffix(rest, "/")
		if !isName(n.host) || !strings.HasPrefix(n.host, "_") {
			return n, true, fmt.Errorf("%q has no name of SRV records, want dns+srv://_SERVICE._tcp.NAME", text)
		}
		return n, true, nil
	}
	host, port, err := net.SplitHostPort(strings.TrimSuffix(rest, "/"))
	number, noPort := strconv.ParseUint(port, 10, 16)
	if err != nil || noPort != nil || number == 0 || !isName(host) {
		return n, true, fmt.Errorf("%q has no name and port, want dns://NAME:PORT", text)
	}
	n.host, n.port = host, uint16(number)
	return n, true, nil
}

// isName reports whether a text can be a DNS name, and no address.
func isName(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil || s == "" || len(s) > 253 {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	})
}

// lookups finds the instances of DNS names, again and again.
type lookups struct {
	config  DNS
	pool    *pool
	metrics *metrics

	mu      sync.Mutex
	names   map[source][]dnsName
	changed chan struct{} // holds one when names are others than at the last lookups
	results chan lookedUp

	// Only run uses these.
	counted []dnsName // names whose instances the pool has
	answers map[string]*dnsAnswer
	running map[string]bool // names whose lookup has not ended
	problem string          // why the pool did not take the instances; empty: it did
}

// lookedUp is the result of one lookup.
type lookedUp struct {
	text string
	urls []*url.URL
	more int // instances that are left out since there are too many
	err  error
}

// dnsAnswer is the last good answer for a name.
type dnsAnswer struct {
	urls    []*url.URL
	more    int       // instances that are left out
	at      time.Time // when it came; zero: there was none
	missing bool      // a server has said since that there is no such name, or no instance of it
	failed  bool      // the last lookup
}

func newLookups(c DNS, p *pool, m *metrics) *lookups {
	if c.Resolver == nil {
		c.Resolver = net.DefaultResolver
	}
	setDefault(&c.Interval, 5*time.Second)
	setDefault(&c.Keep, time.Minute)
	setDefault(&c.Timeout, 5*time.Second)
	return &lookups{
		config: c, pool: p, metrics: m, names: map[source][]dnsName{}, changed: make(chan struct{}, 1),
		results: make(chan lookedUp), answers: map[string]*dnsAnswer{}, running: map[string]bool{},
	}
}

// set replaces the names that a source gives.
func (l *lookups) set(by source, names []dnsName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.Equal(l.names[by], names) {
		return
	}
	l.names[by] = names
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// run looks names up until ctx ends. A name whose lookup takes long delays no other.
func (l *lookups) run(ctx context.Context) {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case got := <-l.results:
			delete(l.running, got.text)
			l.take(&got)
			l.tell()
			continue
		case <-l.changed:
		case <-timer.C:
			select {
			case <-l.changed: // this look is for those names, too
			default:
			}
		}
		l.begin(ctx, &tasks)
		l.tell() // names that are not given any more
		l.forget()
		timer.Reset(l.config.Interval)
	}
}

// given are the names of all sources.
func (l *lookups) given() []dnsName {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Concat(l.names[byFlag], l.names[byFile])
}

// begin starts to look up every name whose last lookup has ended.
func (l *lookups) begin(ctx context.Context, tasks *sync.WaitGroup) {
	for _, n := range l.given() {
		if l.running[n.text] {
			continue
		}
		l.running[n.text] = true
		tasks.Go(func() {
			got := l.lookup(ctx, n)
			select {
			case l.results <- got:
			case <-ctx.Done():
			}
		})
	}
}

// forget drops the answers for names that do not count any more.
func (l *lookups) forget() {
	for text := range l.answers {
		if !slices.ContainsFunc(l.counted, func(n dnsName) bool { return n.text == text }) {
			delete(l.answers, text)
		}
	}
}

// count makes the given names those that count. Until each has been looked up once, those that counted before do so too:
// where one name takes the place of another, there is no time without instances.
func (l *lookups) count() {
	names := l.given()
	if slices.ContainsFunc(names, func(n dnsName) bool { return l.answers[n.text] == nil }) {
		for _, before := range l.counted {
			same := func(n dnsName) bool { return n.role == before.role && n.text == before.text }
			if l.answers[before.text] != nil && !slices.ContainsFunc(names, same) {
				names = append(names, before)
			}
		}
	}
	l.counted = names
}

// tell gives the pool the instances of all names that count.
func (l *lookups) tell() {
	l.count()
	var list []spec
	for _, n := range l.counted {
		a := l.answers[n.text]
		if a == nil {
			continue // it has not been looked up yet
		}
		for _, u := range a.urls {
			list = append(list, spec{role: n.role, group: n.group, url: u, drain: n.drain})
		}
	}
	problem := ""
	if err := l.pool.set(byDNS, list); err != nil {
		problem = err.Error()
	}
	if problem != "" && problem != l.problem {
		l.pool.log.Error("the instances that DNS names are not used", "err", problem)
	}
	l.problem = problem
}

// take notes the result of one lookup. One that fails leaves the last good answer in place, since the instances are still
// probed, and a DNS server that is gone must not take away those that serve.
func (l *lookups) take(got *lookedUp) {
	a := l.answers[got.text]
	if a == nil {
		a = &dnsAnswer{}
		l.answers[got.text] = a
	}
	if got.err != nil {
		l.metrics.lookups.WithLabelValues("failed").Inc()
		l.takeFailure(a, got)
		return
	}
	if a.failed {
		l.pool.log.Info("name is found again", "name", got.text, "instances", len(got.urls))
	}
	result := "ok"
	if got.more > 0 {
		result = "cut"
		if a.more == 0 {
			l.pool.log.Warn("name has too many instances, the first in the order of their addresses are used", "name", got.text,
				"instances", len(got.urls), "left_out", got.more)
		}
	}
	l.metrics.lookups.WithLabelValues(result).Inc()
	*a = dnsAnswer{urls: got.urls, more: got.more, at: time.Now()}
}

// takeFailure drops the last good answer if a server has said since that the name has no instance, and the answer is old
// enough. What no server says anything about stays.
func (l *lookups) takeFailure(a *dnsAnswer, got *lookedUp) {
	if !a.failed {
		a.failed = true
		l.pool.log.Warn("name is not found, its last instances stay for a while, and as long as no server says that it has none",
			"name", got.text, "instances", len(a.urls), "err", got.err)
	}
	a.missing = a.missing || isMissing(got.err)
	if a.missing && len(a.urls) > 0 && time.Since(a.at) >= l.config.Keep {
		l.pool.log.Warn("name has not been found for too long, its instances are forgotten", "name", got.text, "instances", len(a.urls), "err", got.err)
		a.urls = nil
	}
}

// errNoInstance says that a name has no instance.
var errNoInstance = errors.New("the answer has no instance")

// isMissing reports whether a server has said that a name has no instances, as opposed to saying nothing.
func isMissing(err error) bool {
	missing, is := errors.AsType[*net.DNSError](err)
	return is && missing.IsNotFound || errors.Is(err, errNoInstance)
}

// lookup finds the base URLs of a name, in order.
func (l *lookups) lookup(ctx context.Context, n dnsName) lookedUp {
	ctx, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	hosts, more, err := l.hosts(ctx, n)
	if err == nil && len(hosts) == 0 {
		err = errNoInstance
	}
	if err != nil {
		return lookedUp{text: n.text, err: err}
	}
	slices.Sort(hosts)
	hosts = slices.Compact(hosts)
	got := lookedUp{text: n.text, more: more + max(0, len(hosts)-maxAnswers)}
	for _, host := range hosts[:min(len(hosts), maxAnswers)] {
		got.urls = append(got.urls, &url.URL{Scheme: "http", Host: host})
	}
	return got
}

// oneFamily are the IPv4 addresses, or the IPv6 addresses if there are no others: an instance with both is one.
func oneFamily(addresses []netip.Addr) []netip.Addr {
	var v4, v6 []netip.Addr
	for _, a := range addresses {
		a = a.Unmap()
		switch {
		case a.IsUnspecified() || a.IsMulticast():
		case a.Is4():
			v4 = append(v4, a)
		default:
			v6 = append(v6, a)
		}
	}
	if len(v4) > 0 {
		return v4
	}
	return v6
}

// Instance is one that a config file names.
type Instance struct {
	URL   string // base URL, or dns://NAME:PORT, or dns+srv://_SERVICE._tcp.NAME
	Role  string // prefill or decode
	Group string // its replica: a prefill and a decode instance serve a request together only within one; empty: that of all without one
	Drain bool   // it gets no new requests
}

// named are instances as they were given: URLs, and DNS names that stand for others.
type named struct {
	specs []spec
	names []dnsName
}

// has reports whether there are instances of a role, or names that stand for some.
func (n *named) has(r role) bool {
	return slices.ContainsFunc(n.specs, func(s spec) bool { return s.role == r }) || slices.ContainsFunc(n.names, func(d dnsName) bool { return d.role == r })
}

// add reads one instance. place is its role and its URL in one spelling.
func (n *named) add(in Instance) (place string, err error) {
	r, is := map[string]role{prefill.String(): prefill, decode.String(): decode}[in.Role]
	if !is {
		return "", fmt.Errorf("the role of %q is %q, want prefill or decode", in.URL, in.Role)
	}
	if in.Group != "" && !register.IsGroup(in.Group) {
		return "", fmt.Errorf("the group of %q is %q, %s", in.URL, in.Group, register.WantGroup)
	}
	name, isDNS, err := parseDNS(in.URL)
	switch {
	case err != nil:
		return "", err
	case isDNS:
		name.role, name.group, name.drain = r, in.Group, in.Drain
		n.names = append(n.names, name)
		return in.Role + " " + name.text, nil
	}
	u, err := parseURL(in.URL)
	if err != nil {
		return "", err
	}
	n.specs = append(n.specs, spec{role: r, group: in.Group, url: u, drain: in.Drain})
	return in.Role + " " + placeOf(u), nil
}

// CheckInstance says what is wrong with an instance. Instances of one list that have the same place are the same.
func CheckInstance(in Instance) (place string, err error) { return new(named).add(in) }

// parseInstances reads the instances of one source. Errors name the one that is wrong.
func parseInstances(list []Instance) (n named, err error) {
	seen := map[string]bool{}
	for _, in := range list {
		place, err := n.add(in)
		if err != nil {
			return named{}, err
		}
		if seen[place] {
			return named{}, fmt.Errorf("%q appears twice", in.URL)
		}
		seen[place] = true
	}
	return n, nil
}

// SetInstances makes the instances of the config file those of a list. An error names what is wrong; then nothing changes.
func (r *Router) SetInstances(list []Instance) error {
	n, err := parseInstances(list)
	if err != nil {
		return err
	}
	if err := r.pool.set(byFile, n.specs); err != nil {
		return err
	}
	r.lookups.set(byFile, n.names)
	return nil
}
