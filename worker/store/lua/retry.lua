-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still holds it.
-- when: as put_back takes it. counter: the field that counts tries, and `tries` its new value. ttl: seconds for which
-- results are kept, '' as long as they were. at_front: whether it goes to the front then, also later.
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local reply = not_held()
if reply then return reply end

write_run(args.counter, args.tries)
if args.at_front then call('HSET', job, 'enqueue_at_front_on_retry', 1) end
if #ARGV > 1 then
  add_result()
  expire_results(args.ttl)
end
put_back(args.when)
leave_slot(args.when)
count('failed_job_count')
let_go(queue, id, eid, worker)
return 'done'
